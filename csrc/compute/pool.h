// All memory workers as one, without Python: Q, K and V to their inboxes, O from them. The same messages as
// lamina/workers/compute/attention_client.py, whose words are used here. Included after Python.h.
#pragma once

#include <array>
#include <vector>

#include "layer_tags.h"
#include "netstack/calls.h"
#include "rows/send.h"
#include "spans.h"

namespace lamina::compute {

// Rows of a tensor, `row_bytes` each, of which `width` bytes from `offset` on lie without gaps in a message, from `at`.
struct Copy {
  std::size_t tensor, row_bytes, offset, width, at;
  bool all, over;  // all rows; by exclusive or with what lies there
  std::vector<std::int64_t> rows;  // where not all
};

// What one memory worker has of a layer: bytes of its messages, and what lies where. 0 bytes = no message.
struct Share {
  std::array<std::size_t, kMessageKinds> bytes{};
  std::array<std::vector<Copy>, kMessageKinds> copies;
};

struct Step {
  const void* pool = nullptr;  // that it was made for
  std::int64_t rows = 0;
  std::vector<std::vector<Share>> shares;  // by layer that others are like, by link
  LayerTags tags;
};

enum class Event : std::int64_t { kReserve = 30, kSendQ = 13, kSendKV, kWaitO, kReceiveO };

// Not safe for threads.
class Pool {
 public:
  std::vector<const ChannelCalls*> links;
  std::vector<std::size_t> alike;  // layer -> the first one whose shares are of the same form
  double timeout_s = 0;
  Spans spans;
  std::uint64_t send_ns = 0;
  const Step* step = nullptr;  // that messages belong to

  // With the GIL: around calls of the others. `enter`: false with an exception; `leave`: false with an exception where
  // one of them has failed.
  bool enter();
  bool leave();
  // Without it. False where it failed. `tensors`: without gaps, `row_bytes` each row.
  bool send(MessageKind kind, std::size_t layer, std::int64_t rows, const char* const* tensors,
            const std::size_t* row_bytes);
  // Receives O from link `first` on. Returns the number of links if all have arrived. Else returns the link that failed,
  // or whose message is another one, which the channel's next wait_signal returns.
  std::size_t receive(std::size_t layer, std::size_t first, char* const* tensors);

 private:
  bool ready(std::size_t link, Role role);
  bool fail(std::size_t link, Role role, Status status, const char* operation);
  bool refuse(const char* text, std::size_t layer, std::int64_t rows);
  bool interrupted();

  bool failed_ = false, unread_ = false;
  std::size_t failed_link_ = 0;
  Role failed_role_ = Role::sender;
  Status failed_status_ = Status::ready;  // ready: an exception is set
  const char* failed_operation_ = "";
  Message message_{};
};

}  // namespace lamina::compute
