// The kernels of one kind of link, the same for all kinds: kernels.cu includes this once for each, with LAMINA_LINK as its
// channel and LAMINA_OF_LINK(name) as a kernel's whole name.

// Send `*bytes` from `source` with the four words of `tag`.
LAMINA_KERNEL LAMINA_OF_LINK(send)(LAMINA_LINK* channel, const u8* source, const u64* bytes, const u64* tag,
                                   u64 timeout_ns, int* status) {
  send(*channel, Source{source, nullptr, bytes}, tag, timeout_ns, status);
}

// `bytes[0]` from `first`, then `bytes[1]` from `second`, as one message.
LAMINA_KERNEL LAMINA_OF_LINK(send_two)(LAMINA_LINK* channel, const u8* first, const u8* second, const u64* bytes,
                                       const u64* tag, u64 timeout_ns, int* status) {
  send(*channel, Source{first, second, bytes}, tag, timeout_ns, status);
}

// Receive the next message into `target`, which holds `room` bytes; its length and tag go to `bytes` and `tag`.
LAMINA_KERNEL LAMINA_OF_LINK(receive)(LAMINA_LINK* channel, u8* target, u64 room, u64* bytes, u64* tag, u64 timeout_ns,
                                      int* status) {
  receive(*channel, target, timeout_ns, status, Any{room, bytes, tag});
}

// Receive the next message, which must be of `*bytes` and `tag`, into `target`; else see Due.
LAMINA_KERNEL LAMINA_OF_LINK(receive_due)(LAMINA_LINK* channel, u8* target, const u64* bytes, const u64* tag, u64* note,
                                          u64 timeout_ns, int* status) {
  receive(*channel, target, timeout_ns, status, Due{bytes, tag, note});
}

// The parts of these four for a long message, whose copy many blocks share. Each is a kernel, so no block waits for
// another one. Kernels after a failed one do nothing, as always. Without a second part `second` is null.
LAMINA_KERNEL LAMINA_OF_LINK(send_begin)(LAMINA_LINK* channel, const u8* first, const u8* second, const u64* bytes,
                                         u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) begin(*channel, Source{first, second, bytes}, timeout_ns, status);
}

LAMINA_KERNEL LAMINA_OF_LINK(send_fill)(LAMINA_LINK* channel, const u8* first, const u8* second, const u64* bytes,
                                        const int* status) {
  if (*status == kOk) fill(*channel, Source{first, second, bytes});
}

LAMINA_KERNEL LAMINA_OF_LINK(send_end)(LAMINA_LINK* channel, const u8* first, const u8* second, const u64* bytes,
                                       const u64* tag, u64 timeout_ns, int* status) {
  if (threadIdx.x == 0 && *status == kOk) post(*channel, Source{first, second, bytes}, tag, timeout_ns, status);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_begin)(LAMINA_LINK* channel, u64 room, u64* bytes, u64* tag, u64 timeout_ns,
                                            int* status) {
  u64 length;
  const u8* payload;
  if (threadIdx.x == 0) arrive(*channel, timeout_ns, status, Any{room, bytes, tag}, &length, &payload);
}

LAMINA_KERNEL LAMINA_OF_LINK(due_begin)(LAMINA_LINK* channel, const u64* bytes, const u64* tag, u64* note,
                                        u64 timeout_ns, int* status) {
  u64 length;
  const u8* payload;
  if (threadIdx.x == 0) arrive(*channel, timeout_ns, status, Due{bytes, tag, note}, &length, &payload);
}

// What one of the two has taken, which is `*bytes` long.
LAMINA_KERNEL LAMINA_OF_LINK(receive_drain)(LAMINA_LINK* channel, u8* target, const u64* bytes, const int* status) {
  if (*status == kOk) copy(target, payload_in(*channel, channel->received - 1), *bytes);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_end)(LAMINA_LINK* channel, u64 timeout_ns, int* status) {
  release(*channel, timeout_ns, status);
}

// Messages to several channels, or from them, a block for each: what one waits for holds up no other. `first_step` and
// `second_step`: see Rows.
LAMINA_KERNEL LAMINA_OF_LINK(send_all)(const Share<LAMINA_LINK>* shares, u8* first, u64 first_step, u8* second,
                                       u64 second_step, u64 timeout_ns) {
  send_rows(shares[blockIdx.x], Rows{first, first_step, second, second_step}, timeout_ns);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_all)(const Share<LAMINA_LINK>* shares, u8* first, u64 first_step, u64 timeout_ns) {
  receive_rows(shares[blockIdx.x], Rows{first, first_step, nullptr, 0}, timeout_ns);
}

// Their parts for long messages; `blocks` of them share each copy.
LAMINA_KERNEL LAMINA_OF_LINK(send_all_begin)(const Share<LAMINA_LINK>* shares, u8* first, u64 first_step, u8* second,
                                             u64 second_step, u64 timeout_ns) {
  if (threadIdx.x == 0) begin_rows(shares[blockIdx.x], Rows{first, first_step, second, second_step}, timeout_ns);
}

LAMINA_KERNEL LAMINA_OF_LINK(send_all_fill)(const Share<LAMINA_LINK>* shares, u64 blocks, u8* first, u64 first_step,
                                            u8* second, u64 second_step) {
  const auto& share = shares[blockIdx.x / blocks];
  if (*share.status == kOk) fill_rows(share, Rows{first, first_step, second, second_step}, blockIdx.x % blocks, blocks);
}

LAMINA_KERNEL LAMINA_OF_LINK(send_all_end)(const Share<LAMINA_LINK>* shares, u8* first, u64 first_step, u8* second,
                                           u64 second_step, u64 timeout_ns) {
  if (threadIdx.x == 0) post_rows(shares[blockIdx.x], Rows{first, first_step, second, second_step}, timeout_ns);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_all_begin)(const Share<LAMINA_LINK>* shares, u8* first, u64 first_step,
                                                u64 timeout_ns) {
  if (threadIdx.x == 0) arrive_rows(shares[blockIdx.x], Rows{first, first_step, nullptr, 0}, timeout_ns);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_all_drain)(const Share<LAMINA_LINK>* shares, u64 blocks, u8* first,
                                                u64 first_step) {
  const auto& share = shares[blockIdx.x / blocks];
  if (*share.status == kOk) drain_rows(share, Rows{first, first_step, nullptr, 0}, blockIdx.x % blocks, blocks);
}

LAMINA_KERNEL LAMINA_OF_LINK(receive_all_end)(const Share<LAMINA_LINK>* shares, u64 timeout_ns) {
  const auto& share = shares[blockIdx.x];
  release(*share.channel, timeout_ns, share.status);
}

// The halves of both, for a host that reserves ahead and holds what it has received. The counts are the host's, so a
// step that the host gave up may be done again.
LAMINA_KERNEL LAMINA_OF_LINK(reserve)(LAMINA_LINK* channel, u64 granted, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0) return;
  channel->granted = granted;
  reserve(*channel, timeout_ns, status);
}

LAMINA_KERNEL LAMINA_OF_LINK(put)(LAMINA_LINK* channel, const u8* source, const u64* bytes, const u64* tag,
                                  u64 timeout_ns, int* status) {
  put(*channel, Source{source, nullptr, bytes}, tag, timeout_ns, status);
}

LAMINA_KERNEL LAMINA_OF_LINK(take)(LAMINA_LINK* channel, u64 received, u8* target, u64 room, u64* bytes, u64* tag,
                                   u64 timeout_ns, int* status) {
  if (threadIdx.x == 0) channel->received = received;
  take(*channel, target, timeout_ns, status, Any{room, bytes, tag});
}

// `released`: the count with this one. The peer is notified at once.
LAMINA_KERNEL LAMINA_OF_LINK(release)(LAMINA_LINK* channel, u64 released, u64 timeout_ns, int* status) {
  if (threadIdx.x != 0 || *status != kOk) return;
  Bus bus;
  if (released > channel->received) return settle(status, kFault);
  give_back(bus, *channel, released);
  settle(status, persist(bus, *channel, timeout_ns, [&] { return report(bus, *channel); }));
}

// Rounds without the host between them: see `rounds`. `leads`: 0 or 1.
LAMINA_KERNEL LAMINA_OF_LINK(rounds)(LAMINA_LINK* channel, const u8* sources, u64 kinds, u8* targets, u64 bytes,
                                     u64 count, u64 leads, u64* times, u64 timeout_ns, int* status) {
  rounds(*channel, sources, kinds, targets, bytes, count, leads, times, timeout_ns, status);
}
