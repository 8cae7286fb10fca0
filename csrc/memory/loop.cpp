#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/loop.h"

#include "memory/bounds.h"
#include "memory/rounding.h"

namespace lamina::memory_worker {
namespace {

const char* bytes_of(const float* numbers) { return reinterpret_cast<const char*>(numbers); }
char* bytes_of(float* numbers) { return reinterpret_cast<char*>(numbers); }

void write_rows(const Places& places, const char* rows, std::size_t heads, std::size_t head_bytes,
                std::size_t block_size, char* blocks) {
  for (std::size_t i = 0; i < places.rows.size(); ++i) {
    const char* from = rows + std::size_t(places.rows[i]) * heads * head_bytes;
    char* to =
        blocks + (std::size_t(places.blocks[i]) * heads * block_size + std::size_t(places.offsets[i])) * head_bytes;
    for (std::size_t h = 0; h < heads; ++h)
      std::memcpy(to + h * block_size * head_bytes, from + h * head_bytes, head_bytes);
  }
}

}  // namespace

void Loop::begin(std::vector<Step*> steps) {
  steps_ = std::move(steps);
  turn_ = 0, stage_ = Stage::kBegin, started_ = 0;
}

Loop::Stage Loop::stage_after(Stage stage) const {
  switch (stage) {
    case Stage::kBegin: return Stage::kTakeQ;
    case Stage::kTakeQ: return store.overlap ? Stage::kStored : Stage::kTakeKV;
    case Stage::kTakeKV: return store.overlap ? Stage::kReserve : Stage::kStored;
    case Stage::kStored: return store.overlap ? Stage::kTakeKV : Stage::kReserve;
    case Stage::kReserve: return Stage::kFinish;
    case Stage::kFinish: return Stage::kPut;
    case Stage::kPut: return Stage::kWrite;
    case Stage::kWrite: break;
  }
  return Stage::kBegin;
}

Result Loop::run(double patience_s, std::uint64_t overdue, std::size_t limit) {
  patience_s_ = patience_s;
  for (std::size_t i = 0; i < links.size(); ++i)
    if (links[i].calls->engine->stopped()) return {Outcome::kOver, i, Role::receiver, Status::stopped};
  const std::size_t turns = store.layers.size() * steps_.size();
  while (turn_ < turns) {
    if (turn_ >= limit) return {Outcome::kPause};
    if (stage_ == Stage::kBegin && overdue && now_ns() >= overdue) return {Outcome::kPause};
    const Result result = run_stage(spans.on || stage_ >= Stage::kStored ? now_ns() : 0);
    if (result.outcome == Outcome::kSentHalf) stage_ = Stage::kWrite;  // once it is resumed
    if (result.outcome != Outcome::kDone) return result;
    if (stage_ == Stage::kWrite) ++turn_, ++counts.turns;
    stage_ = stage_after(stage_), started_ = 0;
  }
  return {Outcome::kDone};
}

Result Loop::run_stage(std::uint64_t start) {
  const bool answers = form().bytes[kO] != 0;
  switch (stage_) {
    case Stage::kBegin: break;
    case Stage::kTakeQ:
      if (form().bytes[kQ]) return take(kQ, &q_);
      break;
    case Stage::kTakeKV:
      if (form().bytes[kKV])
        if (const Result result = take(kKV, &kv_); result.outcome != Outcome::kDone) return result;
      lay_out_new();
      break;
    case Stage::kStored:
      attend_stored();
      counts.attend_ns += now_ns() - start;
      span(Event::kStored, &start);
      break;
    case Stage::kReserve:
      if (answers) return reserve();
      break;
    case Stage::kFinish:
      if (!answers) break;
      finish();
      counts.attend_ns += now_ns() - start;
      span(Event::kFresh, &start);
      break;
    case Stage::kPut:
      if (answers) return put();
      break;
    case Stage::kWrite: {
      write();
      const std::uint64_t written = now_ns();
      counts.write_ns += written - start;
      if (!step().countings.empty()) count(), counts.score_ns += now_ns() - written;
      span(Event::kWrite, &start);
      Link& from = links[source()];
      for (; from.held; --from.held) from.calls->engine->release();
      break;
    }
  }
  return {Outcome::kDone};
}

Result Loop::take(MessageKind kind, Message* message) {
  const std::size_t at = source();
  Link& link = links[at];
  Engine* engine = link.calls->engine;
  const auto over = [&](Status status) { return Result{Outcome::kOver, at, Role::receiver, status}; };
  Status status = engine->look(Role::receiver);
  std::uint64_t start = spans.on ? now_ns() : 0;
  if (!started_) started_ = start;
  if (status == Status::pending) {
    const std::uint64_t begun = now_ns();
    status = engine->wait(Role::receiver, deadline_in(patience_s_, begun));
    counts.wait_ns += now_ns() - begun;
  }
  if (status == Status::pending) return {Outcome::kPause};
  if (status != Status::ready) return over(status);
  if (status = engine->take(message); status != Status::ready) return over(status);
  const auto tag = step().tags.of(kind, layer());
  const std::size_t bytes = form().bytes[kind];
  if (message->length != bytes || std::memcmp(message->tag, tag.data(), kKeyBytes))
    return {Outcome::kOther, at, Role::receiver, status, "wait_signal", *message};
  ++link.held;
  counts.received_bytes += bytes;
  if (spans.on) span(kind == kQ ? Event::kWaitQ : Event::kWaitKV, &started_, bytes);
  return {Outcome::kDone};
}

Result Loop::reserve() {
  const std::size_t at = reply();
  Engine* engine = links[at].calls->engine;
  const std::uint64_t now = now_ns();
  if (!started_) started_ = now;
  Status status = engine->look(Role::sender);
  if (status == Status::pending) {
    const double left_s = reserve_s - double(now - started_) / 1e9;
    status = engine->wait(Role::sender, deadline_in(std::min(patience_s_, left_s), now));
    if (status == Status::pending && left_s > 0) return {Outcome::kPause};
  }
  if (status != Status::ready) return {Outcome::kOver, at, Role::sender, status, "reserve"};
  slot_ = engine->grant();
  span(Event::kReserve, &started_);
  return {Outcome::kDone};
}

Result Loop::put() {
  const std::size_t at = reply();
  const auto tag = step().tags.of(kO, layer());
  std::uint64_t seqno = 0;
  started_ = now_ns();
  const Status status = links[at].calls->engine->publish(form().bytes[kO], tag.data(), kKeyBytes, &seqno);
  if (status == Status::pending) return {Outcome::kSentHalf, at, Role::sender, status, "put_signal"};
  if (status != Status::ready) return {Outcome::kOver, at, Role::sender, status, "put_signal"};
  sent();
  return {Outcome::kDone};
}

Status Loop::resume(std::size_t at) {
  const Status status = links[at].calls->engine->resume();
  if (status == Status::ready) sent();
  return status;
}

void Loop::sent() {
  counts.sent_bytes += form().bytes[kO];
  span(Event::kSend, &started_, form().bytes[kO]);
}

void Loop::attend_stored() {
  const Layer& layer = store.layers[this->layer()];
  std::size_t size = 0;
  const auto numbers = [](const Piece& piece, std::size_t rows) {
    return rows * std::size_t(piece.op.q_heads) * std::size_t(piece.op.v_dim + 1);
  };
  for (const Piece& piece : layer.pieces) {
    const GroupRows& rows = step().groups[piece.group];
    size += numbers(piece, rows.whole + rows.nodes.size());
  }
  if (stored_.size() < size) stored_.resize(size);
  float* to = stored_.data();
  for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
    const Piece& piece = layer.pieces[i];
    PieceForm& of = form().pieces[i];
    const GroupRows& rows = step().groups[piece.group];
    const auto q_heads = std::size_t(piece.op.q_heads), row = q_heads * std::size_t(piece.op.qk_dim) * store.item;
    const auto into = [&](attention::Prepared prepared, std::size_t count, const char* q) {
      float* lse = to + count * q_heads * std::size_t(piece.op.v_dim);
      attend(piece, prepared, true, q, {piece.k, piece.v, piece.k_scale, piece.v_scale}, to, lse, nullptr);
      to += numbers(piece, count);
    };
    const char* q = reinterpret_cast<const char*>(q_.data);
    if (piece.least && !rows.choices.empty())
      attend_chosen(piece, of, rows, q + of.parts.q, to), to += numbers(piece, rows.whole);
    else if (rows.whole)
      into(of.whole_stored, rows.whole, q + of.parts.q);
    if (!rows.nodes.empty()) into(of.nodes_stored, rows.nodes.size(), gather(q + of.parts.other_q, rows.nodes, row, 0));
  }
}

// Where the new rows lie; those of 8 bits are rounded, each for itself.
void Loop::lay_out_new() {
  const Layer& layer = store.layers[this->layer()];
  const char* kv = reinterpret_cast<const char*>(kv_.data);
  new_.assign(layer.pieces.size(), {});
  std::size_t numbers = 0, scales = 0;
  const auto each = [&](auto use) {
    for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
      const Piece& piece = layer.pieces[i];
      const Parts& parts = form().pieces[i].parts;
      const GroupRows& rows = step().groups[piece.group];
      use(piece.op, new_[i][0], kv + parts.k, kv + parts.v, rows.whole_kv);
      use(piece.op, new_[i][1], kv + parts.other_k, kv + parts.other_v, rows.other_kv);
    }
  };
  if (store.stored == attention::kAsQueries) {
    each([](const auto&, NewRows& to, const char* k, const char* v, std::size_t) { to = {k, v, nullptr, nullptr}; });
    return;
  }
  each([&](const auto& op, NewRows&, const char*, const char*, std::size_t rows) {
    numbers += rows * std::size_t(op.kv_heads * (op.qk_dim + op.v_dim)), scales += 2 * rows * std::size_t(op.kv_heads);
  });
  if (rounded_.size() < numbers) rounded_.resize(numbers);
  if (scales_.size() < scales) scales_.resize(scales);
  char* number = rounded_.data();
  float* scale = scales_.data();
  each([&](const auto& op, NewRows& to, const char* k, const char* v, std::size_t rows) {
    const std::size_t count = rows * std::size_t(op.kv_heads);
    const auto round = [&](const char* from, std::int64_t dim) {
      round_rows(store.wire, store.stored, from, count, std::size_t(dim), number, scale);
      number += count * std::size_t(dim), scale += count;
    };
    to.k = number, to.k_scale = scale, round(k, op.qk_dim);
    to.v = number, to.v_scale = scale, round(v, op.v_dim);
  });
}

void Loop::finish() {
  const Layer& layer = store.layers[this->layer()];
  const char* q = reinterpret_cast<const char*>(q_.data);
  char* const partial = reinterpret_cast<char*>(slot_.data);
  char* const final = partial + form().partial_bytes;
  float* stored = stored_.data();
  for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
    const Piece& piece = layer.pieces[i];
    const PieceForm& of = form().pieces[i];
    const GroupRows& rows = step().groups[piece.group];
    const auto q_heads = std::size_t(piece.op.q_heads), kv_heads = std::size_t(piece.op.kv_heads);
    const auto qk_dim = std::size_t(piece.op.qk_dim), v_dim = std::size_t(piece.op.v_dim);
    float *const whole = stored, *const whole_lse = whole + rows.whole * q_heads * v_dim;
    float* const nodes = whole_lse + rows.whole * q_heads;
    const std::size_t count = rows.nodes.size(), numbers = count * q_heads * v_dim;
    stored = nodes + numbers + count * q_heads;
    float *const o = reinterpret_cast<float*>(partial + of.parts.o), *const lse = reinterpret_cast<float*>(
                                                                         partial + of.parts.lse);
    if (count) {
      std::memcpy(o, nodes, numbers * sizeof(float));
      std::memcpy(lse, nodes + numbers, count * q_heads * sizeof(float));
    }
    if (!rows.fresh.empty()) {
      const char* fresh_q = gather(q + of.parts.other_q, rows.fresh, q_heads * qk_dim * store.item, 0);
      const NewRows& from = new_[i][1];
      NewRows to{gather(from.k, rows.fresh_kv, kv_heads * qk_dim * store.stored_item, 1),
                 gather(from.v, rows.fresh_kv, kv_heads * v_dim * store.stored_item, 2), nullptr, nullptr};
      if (from.k_scale) {
        to.k_scale = gather(from.k_scale, rows.fresh_kv, kv_heads, 3);
        to.v_scale = gather(from.v_scale, rows.fresh_kv, kv_heads, 4);
      }
      attend(piece, of.fresh, false, fresh_q, to, o + numbers, lse + count * q_heads, nullptr);
    }
    if (rows.whole)
      attend(piece, of.whole_fresh, false, q + of.parts.q, new_[i][0], whole, whole_lse, final + of.parts.final);
  }
}

void Loop::write() {
  const Layer& layer = store.layers[this->layer()];
  const auto size = std::size_t(store.block_size);
  for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
    const Piece& piece = layer.pieces[i];
    const GroupRows& rows = step().groups[piece.group];
    const auto heads = std::size_t(piece.op.kv_heads);
    const std::size_t k = std::size_t(piece.op.qk_dim) * store.stored_item;
    const std::size_t v = std::size_t(piece.op.v_dim) * store.stored_item;
    const auto one = [&](const Places& places, const NewRows& from) {
      write_rows(places, from.k, heads, k, size, piece.k);
      write_rows(places, from.v, heads, v, size, piece.v);
      if (from.k_scale) {
        write_rows(places, bytes_of(from.k_scale), heads, sizeof(float), size, bytes_of(piece.k_scale));
        write_rows(places, bytes_of(from.v_scale), heads, sizeof(float), size, bytes_of(piece.v_scale));
      }
      if (!piece.least) return;
      for (std::size_t r = 0; r < places.rows.size(); ++r)
        if (places.offsets[r] == store.block_size - 1) bound_block(store, piece, places.blocks[r]);  // it is whole now
    };
    one(rows.whole_places, new_[i][0]), one(rows.other_places, new_[i][1]);
  }
}

void Loop::attend(const Piece& piece, attention::Prepared prepared, bool stored, const char* q, const NewRows& kv,
                  float* o, float* lse, char* out) {
  attention::Call call{};
  call.op = &piece.op, call.stored = stored;
  call.q = q, call.k = kv.k, call.v = kv.v;
  call.k_scale = kv.k_scale, call.v_scale = kv.v_scale;
  call.o = o, call.lse = lse, call.out = out;
  store.attention->attend(store.attention->engine, call, prepared, store.threads);
}

const float* Loop::gather(const float* from, const Numbers& rows, std::size_t row, std::size_t at) {
  return reinterpret_cast<const float*>(gather(bytes_of(from), rows, row * sizeof(float), at));
}

const char* Loop::gather(const char* from, const Numbers& rows, std::size_t row_bytes, std::size_t at) {
  std::vector<char>& to = rows_[at];
  if (to.size() < rows.size() * row_bytes) to.resize(rows.size() * row_bytes);
  for (std::size_t i = 0; i < rows.size(); ++i)
    std::memcpy(to.data() + i * row_bytes, from + std::size_t(rows[i]) * row_bytes, row_bytes);
  return to.data();
}

void Loop::span(Event event, std::uint64_t* start, std::uint64_t bytes) {
  spans.put(event, layer(), turn_ % steps_.size(), start, bytes);
}

}  // namespace lamina::memory_worker
