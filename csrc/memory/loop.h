// A memory worker's round, layer by layer, without Python: the same order of messages and arithmetic as
// lamina/workers/memory/layer_loop/host_loop.py and attention_step.py, whose words are used here.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "attention/calls.h"
#include "layer_tags.h"
#include "netstack/calls.h"
#include "spans.h"

namespace lamina::memory_worker {

// A piece of a layer and its blocks: k [blocks, kv_heads, block_size, qk_dim], v likewise; scales [blocks, kv_heads,
// block_size] where these are of 8 bits.
struct Piece {
  attention::Operator op;
  std::size_t group;
  char *k, *v;
  float *k_scale, *v_scale;
  char *least, *most;  // bounds of whole blocks [blocks, kv_heads, qk_dim], floats where there are scales; or null
};

struct Layer {
  std::vector<Piece> pieces;
  std::size_t like;  // the first layer whose messages are of the same form
};

// The blocks of all layers, and what computes.
struct Store {
  const attention::Calls* attention;
  int threads;
  attention::Dtype wire;  // of numbers in messages
  attention::Stored stored;
  std::size_t item, stored_item;  // bytes of a number on the wire, and stored
  std::int64_t block_size;
  bool overlap;  // attend stored tokens before K and V have come
  std::vector<std::int64_t> num_blocks;  // by group
  std::vector<Layer> layers;
};

// The offsets of a piece's tensors in a layer's messages, in bytes: o and lse first in O, final results after them.
struct Parts {
  std::size_t q, other_q, k, v, other_k, other_v, o, lse, final;
};

using Numbers = std::vector<std::int64_t>;

// Attention of rows that attend their best blocks alone, each KV head of a row as a sequence of its own: see
// lamina/workers/memory/sparse/selection.py.
struct ByHead {
  Numbers each, tokens, ones, zeros;  // [rows * kv_heads]
  Numbers table;                      // [rows * kv_heads, width], which each layer fills anew
  std::int64_t width;
  attention::Rows rows;
  attention::Tasks tasks;
};

// What a piece needs of its group's rows: those of whole sequences and of the others, over stored and new tokens.
struct PieceForm {
  Parts parts;
  attention::Prepared whole_stored, whole_fresh, nodes_stored, fresh, rest_stored;
  std::unique_ptr<ByHead> by_head;  // where some rows select
};

// The messages of layers that are alike.
struct Form {
  bool there = false;
  std::array<std::size_t, kMessageKinds> bytes{};
  std::size_t partial_bytes = 0;
  std::vector<PieceForm> pieces;
};

// Rows of K and V that stay here, and the block and offset of each.
struct Places {
  Numbers rows, blocks, offsets;
};

// What a group has of a step; see attention_step.py.
struct GroupRows {
  std::size_t whole = 0;  // rows of sequences that are whole here
  Numbers nodes;          // rows of the others' Q for nodes of stored tokens
  Numbers fresh, fresh_kv;  // and for tokens of the step, with the rows of K and V
  Places whole_places, other_places;
  std::size_t whole_kv = 0, other_kv = 0;  // rows of K and V that are used
  std::vector<attention::Choice> choices;  // of rows of whole sequences that select, their blocks here:
  Numbers choice_blocks, choice_tokens;    // and the tokens that each attends
  Numbers rest;                            // the other rows of whole sequences, where there are choices
};

// Rows of a sequence whose attention is counted, and where their sums go, by block.
struct Counting {
  std::size_t group, row;
  Numbers ids, seen;
  std::int64_t* to;
};

// K and V of a piece's new rows as they are stored: [rows, kv_heads, dim], scales [rows, kv_heads].
struct NewRows {
  const char *k, *v;
  const float *k_scale, *v_scale;
};

struct Link {
  const ChannelCalls* calls;
  std::uint64_t held = 0;
};

struct Step {
  std::vector<GroupRows> groups;
  std::vector<Counting> countings;
  std::vector<Form> forms;  // by layer that others are like
  std::vector<std::size_t> sources, replies;  // by layer: links
  LayerTags tags;
};

enum class Event : std::int64_t { kWaitQ = 22, kWaitKV, kStored, kWrite, kFresh, kSend, kReserve = 30 };

struct Counts {
  std::uint64_t attend_ns, write_ns, score_ns, wait_ns, turns, received_bytes, sent_bytes;
};

// done: the round is. pause: nothing has come in time, or it is time to look elsewhere. other: the last message is none
// of this turn's. over: a link's wait came to `status`. sent_half: a put was interrupted.
enum class Outcome { kDone, kPause, kOther, kOver, kSentHalf };

struct Result {
  Outcome outcome;
  std::size_t link = 0;
  Role role = Role::receiver;
  Status status = Status::ready;
  const char* operation = "wait_signal";  // of the contract
  Message message{};
};

// One round: each layer has a turn for each step. Not safe for threads.
class Loop {
 public:
  Store store;
  std::vector<Link> links;  // one for each replica
  double reserve_s = 0;     // that a slot is waited for
  Spans spans;
  Counts counts{};

  void begin(std::vector<Step*> steps);
  // Continues until something unusual happens. Each wait takes at most `patience_s`. It pauses before the next turn once
  // the time `overdue` is over (0: never), and before turn `limit`. Throws std::bad_alloc.
  Result run(double patience_s, std::uint64_t overdue, std::size_t limit);
  // What the last run has sent half.
  Status resume(std::size_t link);
  std::size_t turn() const { return turn_; }
  std::size_t num_steps() const { return steps_.size(); }
  MessageKind waits_for() const { return stage_ == Stage::kTakeKV ? kKV : kQ; }

 private:
  enum class Stage { kBegin, kTakeQ, kTakeKV, kStored, kReserve, kFinish, kPut, kWrite };

  Step& step() const { return *steps_[turn_ % steps_.size()]; }
  std::size_t layer() const { return turn_ / steps_.size(); }
  Form& form() const { return step().forms[store.layers[layer()].like]; }
  std::size_t source() const { return step().sources[layer()]; }
  std::size_t reply() const { return step().replies[layer()]; }
  Stage stage_after(Stage) const;

  Result run_stage(std::uint64_t start);
  Result take(MessageKind, Message*);
  Result reserve();
  Result put();
  void sent();
  void attend_stored();
  void finish();
  void write();
  // Rows of a piece's Q over stored tokens, some of which select: o, and lse after it.
  void attend_chosen(const Piece&, PieceForm&, const GroupRows&, const char* q, float* to);
  void count();  // what the step wants to know of the layer's attention
  void lay_out_new();
  void attend(const Piece&, attention::Prepared, bool stored, const char* q, const NewRows& kv, float* o, float* lse,
              char* out);
  const char* gather(const char* from, const Numbers& rows, std::size_t row_bytes, std::size_t at);
  const float* gather(const float* from, const Numbers& rows, std::size_t row, std::size_t at);
  void span(Event, std::uint64_t* start, std::uint64_t bytes = 0);

  std::vector<Step*> steps_;
  std::size_t turn_ = 0;
  Stage stage_ = Stage::kBegin;
  Message q_{}, kv_{};
  Grant slot_{};
  double patience_s_ = 0;
  std::uint64_t started_ = 0;  // waiting for what the turn waits for; 0: not yet
  std::vector<float> stored_;  // what attention over stored tokens has found, o and lse of each piece
  std::vector<std::array<NewRows, 2>> new_;  // by piece, of whole sequences and of the others
  std::vector<char> rounded_;  // numbers of new_, where they are not the message's
  std::vector<float> scales_;
  std::array<std::vector<char>, 5> rows_;  // of Q, K, V and scales that were gathered
  std::vector<float> chosen_;  // results of rows that are not side by side
  std::vector<std::int64_t> counted_;
};

}  // namespace lamina::memory_worker
