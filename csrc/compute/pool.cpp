#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "compute/pool.h"

namespace lamina::compute {
namespace {

void fold(char* over, const char* bytes, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) over[i] = char(over[i] ^ bytes[i]);
}

// To a message, or from it.
template <bool to_message, class Byte>
void copy(const Copy& each, std::int64_t rows, char* message, Byte* tensor) {
  char* packed = message + each.at;
  const std::int64_t count = each.all ? rows : std::int64_t(each.rows.size());
  if (each.all && each.width == each.row_bytes && !each.over) {
    const std::size_t bytes = std::size_t(count) * each.width;
    if constexpr (to_message)
      std::memcpy(packed, tensor, bytes);
    else
      std::memcpy(tensor, packed, bytes);
    return;
  }
  for (std::int64_t i = 0; i < count; ++i, packed += each.width) {
    Byte* row = tensor + std::size_t(each.all ? i : each.rows[std::size_t(i)]) * each.row_bytes + each.offset;
    if constexpr (!to_message)
      std::memcpy(row, packed, each.width);
    else if (each.over)
      fold(packed, row, each.width);
    else
      std::memcpy(packed, row, each.width);
  }
}

}  // namespace

bool Pool::enter() {
  failed_ = unread_ = false;
  for (std::size_t i = 0; i < links.size(); ++i) {
    if (links[i]->enter(links[i]->channel)) continue;
    for (std::size_t j = 0; j < i; ++j) links[j]->leave(links[j]->channel, 0);
    return false;
  }
  return true;
}

bool Pool::leave() {
  if (failed_ && failed_status_ != Status::ready) {
    const ChannelCalls& calls = *links[failed_link_];
    calls.raise(calls.channel, failed_role_, failed_status_, failed_operation_, timeout_s);
  }
  if (unread_) links[failed_link_]->unread(links[failed_link_]->channel, message_);
  for (const ChannelCalls* link : links) link->leave(link->channel, 0);
  return !failed_;
}

bool Pool::fail(std::size_t link, Role role, Status status, const char* operation) {
  failed_ = true, failed_link_ = link, failed_role_ = role, failed_status_ = status, failed_operation_ = operation;
  return false;
}

bool Pool::refuse(const char* text, std::size_t layer, std::int64_t rows) {
  const PyGILState_STATE state = PyGILState_Ensure();
  PyErr_Format(PyExc_ValueError, "%lld rows for layer %zu of a step of %lld rows: %s", (long long)rows, layer,
               (long long)step->rows, text);
  PyGILState_Release(state);
  return fail(0, Role::sender, Status::ready, "");
}

// Whether a signal's handler has raised an exception.
bool Pool::interrupted() {
  const PyGILState_STATE state = PyGILState_Ensure();
  const bool raised = PyErr_CheckSignals();
  PyGILState_Release(state);
  return raised;
}

bool Pool::ready(std::size_t link, Role role) {
  Engine* engine = links[link]->engine;
  Status status = engine->look(role);
  if (status == Status::pending) {
    std::uint64_t now = now_ns();
    const std::uint64_t deadline = deadline_in(timeout_s, now);
    do {
      status = engine->wait(role, deadline);
      now = now_ns();
      if (status == Status::pending && interrupted()) return fail(link, role, Status::ready, "");
    } while (status == Status::pending && now < deadline);
  }
  return status == Status::ready || fail(link, role, status, role == Role::sender ? "reserve" : "wait_signal");
}

bool Pool::send(MessageKind kind, std::size_t layer, std::int64_t rows, const char* const* tensors,
                const std::size_t* row_bytes) {
  if (layer >= alike.size() || rows != step->rows) return refuse("they are to be as many", layer, rows);
  const std::uint64_t begun = now_ns();
  const auto tag = step->tags.of(kind, layer);
  const auto& shares = step->shares[alike[layer]];
  for (std::size_t i = 0; i < links.size(); ++i) {
    const std::size_t bytes = shares[i].bytes[kind];
    if (!bytes) continue;
    for (const Copy& each : shares[i].copies[kind])
      if (each.row_bytes != row_bytes[each.tensor]) return refuse("they are of other bytes", layer, rows);
    std::uint64_t start = spans.on ? now_ns() : 0;
    if (!ready(i, Role::sender)) return false;
    Engine* engine = links[i]->engine;
    const Grant slot = engine->grant();
    spans.put(Event::kReserve, layer, i, &start, 0);
    for (const Copy& each : shares[i].copies[kind])
      copy<true>(each, rows, reinterpret_cast<char*>(slot.data), tensors[each.tensor]);
    std::uint64_t seqno = 0;
    Status status = engine->publish(bytes, tag.data(), kKeyBytes, &seqno);
    while (status == Status::pending) {
      if (interrupted()) {
        engine->give_up("a put was interrupted half-way");
        return fail(i, Role::sender, Status::ready, "");
      }
      status = engine->resume();
    }
    if (status != Status::ready) return fail(i, Role::sender, status, "put_signal");
    spans.put(kind == kQ ? Event::kSendQ : Event::kSendKV, layer, i, &start, bytes);
  }
  send_ns += now_ns() - begun;
  return true;
}

std::size_t Pool::receive(std::size_t layer, std::size_t first, char* const* tensors) {
  const auto tag = step->tags.of(kO, layer);
  const auto& shares = step->shares[alike[layer]];
  std::size_t i = first;
  for (; i < links.size(); ++i) {
    const std::size_t bytes = shares[i].bytes[kO];
    if (!bytes) continue;
    std::uint64_t start = spans.on ? now_ns() : 0;
    if (!ready(i, Role::receiver)) break;
    if (const Status status = links[i]->engine->take(&message_); status != Status::ready) {
      fail(i, Role::receiver, status, "wait_signal");
      break;
    }
    if (message_.length != bytes || std::memcmp(message_.tag, tag.data(), kKeyBytes)) {
      unread_ = true, failed_link_ = i;
      break;
    }
    spans.put(Event::kWaitO, layer, i, &start, 0);
    for (const Copy& each : shares[i].copies[kO])
      copy<false>(each, step->rows, reinterpret_cast<char*>(message_.data), tensors[each.tensor]);
    links[i]->engine->release();
    spans.put(Event::kReceiveO, layer, i, &start, bytes);
  }
  return i;
}

}  // namespace lamina::compute
