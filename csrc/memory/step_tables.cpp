#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/step_tables.h"

#include <algorithm>

namespace lamina::memory_worker {

void read_store(Store& store, Reader& in) {
  store.threads = int(in.next(1, 1 << 10));
  store.wire = attention::Dtype(in.next(0, attention::kDtypes - 1));
  store.stored = attention::Stored(in.next(0, attention::kStored - 1));
  store.item = store.wire == attention::kFloat32 ? 4 : 2;
  store.stored_item = store.stored == attention::kAsQueries ? store.item : 1;
  store.block_size = in.next(1, kMost);
  store.overlap = in.next(0, 1);
  store.num_blocks = in.list(0, kMost);
  const std::int64_t layers = in.next(1, 1 << 16);
  for (std::int64_t i = 0; i < layers && !in.failed; ++i) {
    Layer layer{};
    layer.like = std::size_t(in.next(0, i));
    const std::int64_t pieces = in.next(0, 1 << 16);
    for (std::int64_t j = 0; j < pieces && !in.failed; ++j) {
      Piece piece{};
      piece.group = std::size_t(in.next(0, std::int64_t(store.num_blocks.size()) - 1));
      auto& op = piece.op;
      for (std::int64_t* x : {&op.q_heads, &op.kv_heads, &op.qk_dim, &op.v_dim}) *x = in.next(1, 1 << 20);
      op.window = in.next(0, kMost);
      op.scale = float(in.real()), op.softcap = float(in.real());
      op.sinks = pointer<float>(in.next()), op.slopes = pointer<float>(in.next());
      piece.k = pointer<char>(in.next()), piece.v = pointer<char>(in.next());
      piece.k_scale = pointer<float>(in.next()), piece.v_scale = pointer<float>(in.next());
      piece.least = pointer<char>(in.next()), piece.most = pointer<char>(in.next());
      if (!piece.least != !piece.most) in.failed = true;
      const bool scaled = store.stored != attention::kAsQueries;
      if (!in.failed && (!piece.k_scale == scaled || !piece.v_scale == scaled)) in.failed = true;
      if (!in.failed && op.q_heads % op.kv_heads) in.failed = true;
      layer.pieces.push_back(piece);
    }
    if (!in.failed && store.layers.size() > layer.like && store.layers[layer.like].pieces.size() != layer.pieces.size())
      in.failed = true;
    store.layers.push_back(std::move(layer));
  }
}

namespace {

void read_places(Places& places, Reader& in, const Store& store, std::size_t group) {
  places.rows = in.list(0, kMost);
  places.blocks = in.list(0, store.num_blocks[group] - 1);
  places.offsets = in.list(0, store.block_size - 1);
  if (places.blocks.size() != places.rows.size() || places.offsets.size() != places.rows.size()) in.failed = true;
}

// Rows that select, after the number of rows of whole sequences.
void read_choices(GroupRows& rows, Reader& in, const Store& store, std::size_t group) {
  const Numbers numbers = in.list(0, kMost);
  rows.choice_blocks = in.list(0, store.num_blocks[group] - 1), rows.choice_tokens = in.list(1, kMost);
  rows.rest = in.list(0, std::int64_t(rows.whole) - 1);
  if (in.failed || numbers.empty()) return;
  const auto count = std::int64_t(numbers.size() / 6), blocks = std::int64_t(rows.choice_blocks.size());
  in.failed =
      !store.attention->choices(numbers.data(), count, rows.choice_blocks.data(), blocks, blocks, &rows.choices) ||
      attention::kChunk % store.block_size || rows.choices.size() != rows.choice_tokens.size() ||
      rows.choices.size() + rows.rest.size() != rows.whole;
  for (std::size_t i = 0; i < rows.choices.size() && !in.failed; ++i) {
    const attention::Choice& one = rows.choices[i];
    const std::int64_t kept = one.total - (one.high - one.low) + one.best;
    const std::int64_t room = kept * store.block_size - rows.choice_tokens[i];  // in the last block
    if (one.row >= std::int64_t(rows.whole) || room < 0 || room >= store.block_size) in.failed = true;
  }
}

void read_counting(Counting& of, Reader& in, const Store& store, const Step& step) {
  of.group = std::size_t(in.next(0, std::int64_t(step.groups.size()) - 1));
  of.row = std::size_t(in.next(0, kMost));
  if (in.failed) return;
  of.ids = in.list(0, store.num_blocks[of.group] - 1);
  of.seen = in.list(0, std::int64_t(of.ids.size()) * store.block_size);
  of.to = pointer<std::int64_t>(in.next());
  if (of.row + of.seen.size() > step.groups[of.group].whole || of.ids.empty() || !of.to) in.failed = true;
}

// Whether the rows of each piece lie in the messages.
bool fits(const Store& store, const Step& step, const std::vector<std::int64_t>& other_q) {
  for (std::size_t i = 0; i < store.layers.size(); ++i) {
    const Layer& layer = store.layers[i];
    const Form& form = step.forms[layer.like];
    if (!form.there || form.pieces.size() != layer.pieces.size()) return false;
    for (std::size_t p = 0; p < layer.pieces.size(); ++p) {
      const Piece& piece = layer.pieces[p];
      const Parts& at = form.pieces[p].parts;
      const GroupRows& group = step.groups[piece.group];
      const auto within = [](std::size_t start, std::int64_t count, std::int64_t numbers, std::size_t item,
                             std::size_t end) {
        return !count || __int128(count) * numbers * std::int64_t(item) + std::int64_t(start) <= std::int64_t(end);
      };
      const auto& op = piece.op;
      const std::int64_t q = op.q_heads * op.qk_dim, k = op.kv_heads * op.qk_dim, v = op.kv_heads * op.v_dim;
      const auto results = std::int64_t(group.nodes.size() + group.fresh.size());
      const auto whole = std::int64_t(group.whole_kv), other_kv = std::int64_t(group.other_kv);
      const std::size_t item = store.item;
      const bool all =
          within(at.q, whole, q, item, form.bytes[kQ]) &&
          within(at.other_q, other_q[piece.group], q, item, form.bytes[kQ]) &&
          within(at.k, whole, k, item, form.bytes[kKV]) && within(at.v, whole, v, item, form.bytes[kKV]) &&
          within(at.other_k, other_kv, k, item, form.bytes[kKV]) &&
          within(at.other_v, other_kv, v, item, form.bytes[kKV]) &&
          within(at.o, results, op.q_heads * op.v_dim, sizeof(float), form.partial_bytes) &&
          within(at.lse, results, op.q_heads, sizeof(float), form.partial_bytes) &&
          within(form.partial_bytes + at.final, std::int64_t(group.whole), op.q_heads * op.v_dim, item, form.bytes[kO]);
      if (!all) return false;
    }
  }
  return true;
}

// One more than the largest of the numbers.
std::int64_t end_of(const Numbers& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end()) + 1;
}

}  // namespace

void read_step(Step& step, Reader& in, const Loop& loop) {
  const Store& store = loop.store;
  Numbers other_q;  // by group, rows of Q of sequences that are not whole
  step.groups.resize(store.num_blocks.size());
  for (std::size_t g = 0; g < step.groups.size() && !in.failed; ++g) {
    GroupRows& rows = step.groups[g];
    rows.whole = std::size_t(in.next(0, kMost));
    rows.nodes = in.list(0, kMost), rows.fresh = in.list(0, kMost), rows.fresh_kv = in.list(0, kMost);
    read_places(rows.whole_places, in, store, g), read_places(rows.other_places, in, store, g);
    read_choices(rows, in, store, g);
    if (rows.fresh.size() != rows.fresh_kv.size()) in.failed = true;
    rows.whole_kv = std::size_t(std::max(std::int64_t(rows.whole), end_of(rows.whole_places.rows)));
    rows.other_kv = std::size_t(std::max(end_of(rows.fresh_kv), end_of(rows.other_places.rows)));
    other_q.push_back(std::max(end_of(rows.nodes), end_of(rows.fresh)));
  }
  step.countings.resize(std::size_t(in.next(0, 1 << 20)));
  for (Counting& each : step.countings)
    if (!in.failed) read_counting(each, in, store, step);
  step.forms.resize(store.layers.size());
  const std::int64_t forms = in.next(1, std::int64_t(step.forms.size()));
  for (std::int64_t i = 0; i < forms && !in.failed; ++i) {
    const auto like = std::size_t(in.next(0, std::int64_t(step.forms.size()) - 1));
    if (in.failed) break;
    Form& form = step.forms[like];
    form.there = true;
    for (auto& bytes : form.bytes) bytes = std::size_t(in.next(0, kMost));
    form.partial_bytes = std::size_t(in.next(0, std::int64_t(form.bytes[kO])));
    form.pieces.resize(store.layers[like].pieces.size());
    for (PieceForm& piece : form.pieces) {
      Parts& at = piece.parts;
      for (std::size_t* x : {&at.q, &at.other_q, &at.k, &at.v, &at.other_k, &at.other_v, &at.o, &at.lse, &at.final})
        *x = std::size_t(in.next(0, kMost));
    }
  }
  for (auto* links : {&step.sources, &step.replies})
    for (std::size_t i = 0; i < store.layers.size(); ++i)
      links->push_back(std::size_t(in.next(0, std::int64_t(loop.links.size()) - 1)));
  if (in.at != in.end) in.failed = true;
  if (!in.failed && !fits(store, step, other_q)) in.failed = true;
  for (std::size_t i = 0; i < store.layers.size() && !in.failed; ++i)
    if (step.forms[store.layers[i].like].bytes[kO] > loop.links[step.replies[i]].calls->slot_bytes) in.failed = true;
}

namespace {

std::unique_ptr<ByHead> by_head(const Store& store, const Piece& piece, const GroupRows& rows) {
  auto to = std::make_unique<ByHead>();
  const std::int64_t heads = piece.op.kv_heads;
  const auto all = rows.choices.size() * std::size_t(heads);
  for (std::size_t i = 0; i < all; ++i) {
    to->each.push_back(std::int64_t(i)), to->tokens.push_back(rows.choice_tokens[i / std::size_t(heads)]);
  }
  to->ones.assign(all, 1), to->zeros.assign(all, 0);
  const std::int64_t most = *std::max_element(to->tokens.begin(), to->tokens.end());
  to->width = (most + attention::kChunk - 1) / attention::kChunk * (attention::kChunk / store.block_size);
  to->table.assign(all * std::size_t(to->width), store.num_blocks[piece.group] * heads);  // the null block
  to->rows = {to->each.data(),  to->tokens.data(), to->ones.data(),   to->zeros.data(), to->tokens.data(),
              to->zeros.data(), to->table.data(),  std::int64_t(all), to->width,        store.block_size};
  attention::Operator one = piece.op;
  one.q_heads = piece.op.group(), one.kv_heads = 1;
  to->tasks = store.attention->tasks(to->rows, true, one, store.threads);
  return to;
}

}  // namespace

// The tasks of each piece. `prepared`: of each group, whole, nodes, fresh and rest, or None. False with an exception.
bool prepare(Step& step, const Store& store, PyObject* prepared) {
  if (PyTuple_GET_SIZE(prepared) != 4 * Py_ssize_t(step.groups.size()))
    return PyErr_Format(PyExc_ValueError, "four steps of attention for each group"), false;
  for (std::size_t i = 0; i < step.forms.size(); ++i) {
    if (!step.forms[i].there) continue;
    for (std::size_t p = 0; p < step.forms[i].pieces.size(); ++p) {
      const Piece& piece = store.layers[i].pieces[p];
      PieceForm& of = step.forms[i].pieces[p];
      const GroupRows& rows = step.groups[piece.group];
      const auto one = [&](Py_ssize_t which, std::size_t count, bool stored, attention::Prepared* to) {
        if (!count) return true;
        PyObject* const object = PyTuple_GET_ITEM(prepared, 4 * Py_ssize_t(piece.group) + which);
        *to = store.attention->prepare(store.attention->kernels, object, stored, piece.op, store.threads);
        if (!to->rows) return false;
        std::int64_t all = 0;
        for (std::int64_t s = 0; s < to->rows->sequences; ++s) all += to->rows->count[s];
        if (all == std::int64_t(count)) return true;
        return PyErr_Format(PyExc_ValueError, "%lld rows of attention where there are %zu", (long long)all, count),
               false;
      };
      if (!one(0, rows.whole, true, &of.whole_stored) || !one(0, rows.whole, false, &of.whole_fresh) ||
          !one(1, rows.nodes.size(), true, &of.nodes_stored) || !one(2, rows.fresh.size(), false, &of.fresh) ||
          !one(3, rows.rest.size(), true, &of.rest_stored))
        return false;
      if (!rows.choices.empty()) of.by_head = by_head(store, piece, rows);
    }
  }
  return true;
}

}  // namespace lamina::memory_worker
