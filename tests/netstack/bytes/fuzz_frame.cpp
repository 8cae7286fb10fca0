// Fuzzes the frame decoder of csrc/netstack/host/frame.h: hostile streams in hostile pieces, and the invariants of what
// comes out. Built with -fsanitize=address,undefined; with clang -fsanitize=fuzzer, else with the driver below, which
// mutates honest streams from a seed:  fuzz_frame EXECUTIONS [SEED]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "netstack/host/frame.h"

using namespace lamina;

namespace {

constexpr std::uint64_t kSlots = 3, kSlotBytes = 200, kEpoch = 9, kZero = kEpoch << kEpochShift;

std::uint64_t delivered, refused;  // messages, streams

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

// A reader of input bytes; zeros follow their end.
struct Input {
  const std::uint8_t* p;
  std::size_t left;

  std::uint64_t next(std::uint64_t below) {
    if (!left) return 0;
    --left;
    return *p++ % below;
  }
  std::uint64_t word() {
    std::uint64_t value = 0;
    const std::size_t part = std::min(left, sizeof value);
    std::memcpy(&value, p, part);
    p += part;
    left -= part;
    return value;
  }
};

// One frame, honest but for what the input changes. Its checks are right unless the input breaks them: a peer that
// holds the key can say anything, and the decoder must be safe from it too.
void append(std::vector<std::uint8_t>& stream, Input& input, Guard& guard, std::uint64_t count, bool honest,
            std::uint64_t* sent) {
  Frame frame{};
  std::vector<std::uint8_t> payload(input.next(kSlotBytes + 1), std::uint8_t(count));
  frame.kind = std::uint16_t(1 + input.next(honest ? 2 : 3));
  if (frame.kind == kCredit) payload.clear();
  frame.length = payload.size();
  frame.seqno = frame.kind == kData ? kZero + ++*sent : 0;
  frame.credit = kZero;
  const std::uint64_t twist = honest ? 0 : input.next(16);
  if (twist == 1) frame.length = input.word();
  if (twist == 2) frame.seqno = input.word();
  if (twist == 3) frame.credit = input.word();
  if (twist == 4) frame.kind = std::uint16_t(input.word());
  if (twist == 5) frame.seqno += input.next(4) - 2;
  if (twist == 6) frame.credit += input.next(8) - 2;
  guard.begin(kPayloadPart, count);  // of the bytes that are there
  guard.seal(payload.data(), payload.size());
  guard.seal_end(frame.payload_check);
  close_header(&frame, guard, count);
  const auto* header = bytes_of(&frame);
  const std::size_t start = stream.size();
  stream.insert(stream.end(), header, header + kFrameBytes);
  stream.insert(stream.end(), payload.begin(), payload.end());
  if (twist == 7) stream[start + input.next(kFrameBytes)] ^= std::uint8_t(1 << input.next(8));
  if (twist == 8) stream.resize(stream.size() - std::min<std::size_t>(stream.size() - start, input.next(64)));
}

// `ends`: of an honest stream, where its messages end; its sender waits for credit. Empty: the stream may be anything.
void feed(const std::vector<std::uint8_t>& stream, Input& input, Guard guard, const std::vector<std::size_t>& ends) {
  const bool honest = !ends.empty();
  // The inbox ends where the heap block ends, so that the sanitizer sees a byte too far.
  const std::unique_ptr<std::uint8_t[]> inbox(new std::uint8_t[Slots::bytes(kSlots, kSlotBytes)]);
  Books books{kZero};
  books.sent = 2;
  Decoder decoder(books, Slots{inbox.get(), kSlots, kSlotBytes}, std::move(guard), 1 + input.next(2) * 100);
  std::uint64_t taken = 0;
  std::vector<std::uint8_t> fills;  // of each message taken
  std::size_t at = 0;
  while (at < stream.size() && !decoder.ended()) {
    iovec pieces[3] = {};
    const std::size_t count = decoder.room(pieces);
    require(count >= 1 && pieces[count - 1].iov_len > 0, "there is always room");
    std::size_t bytes = std::min(stream.size() - at, std::size_t(1 + input.next(256)) * (input.next(2) ? 1 : 29));
    if (honest) {
      const std::uint64_t next = books.released + kSlots;  // which may not be sent yet
      if (next <= ends.size()) bytes = std::min(bytes, ends[next - 1] - at);
      if (bytes == 0) {
        ++books.released;
        continue;
      }
    }
    std::size_t put = 0;
    for (std::size_t i = 0; i < count && put < bytes; ++i) {
      const std::size_t part = std::min(bytes - put, pieces[i].iov_len);
      std::memcpy(pieces[i].iov_base, stream.data() + at + put, part);
      put += part;
    }
    at += put;
    if (!decoder.took(put)) {
      require(decoder.fault()[0] != 0, "a fault has a reason");
      require(!honest, "an honest stream is taken");
      ++refused;
      break;
    }
    require(books.arrived - books.released <= kSlots, "no more messages than slots");
    require(books.credited <= books.sent, "no credit for what was not sent");
    while (taken < books.arrived) {
      const Frame& frame = decoder.arrival(taken);
      require(frame.seqno == kZero + taken + 1, "messages in order, each once");
      require(frame.length <= kSlotBytes, "no message beyond its slot");
      for (std::uint64_t i = 1; i < frame.length; ++i)
        require(decoder.payload(taken)[i] == decoder.payload(taken)[0], "whole payloads");
      fills.push_back(frame.length ? decoder.payload(taken)[0] : 0);
      ++taken;
      ++delivered;
      if (input.next(4)) ++books.released;
    }
    for (std::uint64_t n = books.released; n < taken; ++n)
      for (std::uint64_t i = 0; i < decoder.arrival(n).length; ++i)
        require(decoder.payload(n)[i] == fills[n], "nothing is written over a message that is held");
  }
  require(!honest || taken == ends.size(), "every message of an honest stream arrives");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Input input{data, size};
  const std::uint8_t key[kKeyBytes] = {7};
  const bool hides = input.next(2);
  Guard guard = hides ? Guard(key, true) : Guard();
  require(guard.sound(), Crypto::get().fault);
  std::vector<std::uint8_t> stream;
  std::uint64_t sent = 0;
  const bool honest = input.next(3) == 0;
  std::vector<std::size_t> ends;
  for (std::uint64_t n = input.next(8), i = 0; i < n; ++i) {
    append(stream, input, guard, i, honest, &sent);
    if (honest && sent > ends.size()) ends.push_back(stream.size());
  }
  if (!honest && input.next(4) == 0) {  // noise
    stream.insert(stream.end(), input.p, input.p + input.left);
  }
  feed(stream, input, hides ? Guard(key, false) : Guard(), ends);
  return 0;
}

#ifndef LIBFUZZER
namespace {
std::uint64_t state;
std::uint64_t random64() {  // xorshift64*
  state ^= state >> 12;
  state ^= state << 25;
  state ^= state >> 27;
  return state * 0x2545f4914f6cdd1dull;
}
}  // namespace

int main(int argc, char** argv) {
  const std::uint64_t executions = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 100000;
  state = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::vector<std::uint8_t> data;
  for (std::uint64_t i = 0; i < executions; ++i) {
    data.resize(random64() % 160);
    for (std::uint8_t& byte : data) byte = std::uint8_t(random64() >> 32);
    LLVMFuzzerTestOneInput(data.data(), data.size());
  }
  using Number = unsigned long long;
  std::printf("executions %llu delivered %llu refused %llu\n", Number(executions), Number(delivered), Number(refused));
}
#endif
