#include "rows/table.h"

#include <atomic>

#include "gemm/quantized.h"

namespace lamina::rows {
namespace {

constexpr std::int64_t kElementsOfAPiece = 1 << 14;  // a thread is woken for no less

// The form of a quantized weight: nothing, or its numbers.
std::optional<gemm::Form> read_form(Reader& in) {
  gemm::Form form{};
  form.bits = static_cast<std::size_t>(in.next(0, 8));
  if (!form.bits) return {};
  form.block = static_cast<std::size_t>(in.next(1, 1 << 20));
  form.by_channel = in.next(0, 1) != 0;
  form.scales = static_cast<gemm::Type>(in.next(0, 2));
  form.offsets = in.next(0, 1) != 0;
  form.int8_x = in.next(0, 1) != 0;
  for (float& value : form.values) value = static_cast<float>(in.real());
  if (!gemm::quantized::is_known(form)) in.failed = true;
  return form;
}

Instruction read_instruction(Reader& in, std::int64_t slots) {
  Instruction each{};
  each.kind = static_cast<Kind>(in.next(0, 5));
  for (auto& size : each.sizes) size = in.next(1);
  each.inner = in.next(1);
  each.n = in.next(0);
  each.leading = in.next(0);
  each.value = in.real();
  static constexpr std::int64_t kLeastViews[] = {1, 2, 3, 3, 3, 2};
  const std::int64_t views = in.next(kLeastViews[static_cast<int>(each.kind)], 1 << 10);
  for (std::int64_t i = 0; i < views && !in.failed; ++i) {
    View view{};
    view.slot = static_cast<std::int32_t>(in.next(0, slots - 1));
    view.type = static_cast<Type>(in.next(0, 4));
    view.offset = in.next(0);
    for (auto& step : view.outer) step = in.next(0);
    view.inner = in.next(0);
    each.views.push_back(view);
  }
  if (each.kind == Kind::kMean && each.n >= static_cast<std::int64_t>(kRegisters)) in.failed = true;
  const std::int64_t steps = in.next(0, 1 << 12), most = static_cast<std::int64_t>(kRegisters) - 1;
  for (std::int64_t i = 0; i < steps && !in.failed; ++i) {
    Step step{};
    step.op = static_cast<Op>(in.next(0, static_cast<int>(Op::kCount) - 1));
    step.to = static_cast<std::uint8_t>(in.next(0, most));
    step.a = static_cast<std::uint8_t>(in.next(0, most));
    step.b = static_cast<std::uint8_t>(in.next(0, most));
    step.value = static_cast<float>(in.real());
    step.view = static_cast<std::int32_t>(in.next(0, views - 1));
    each.steps.push_back(step);
  }
  each.form = read_form(in);
  const bool takes_form = each.kind == Kind::kLinear || each.kind == Kind::kLookUp;
  if (each.form && (!takes_form || each.leading)) in.failed = true;
  return each;
}

// Whether all that an instruction touches of rows lies in them, and its linear layer has one type.
bool fits(const Instruction& each, const std::vector<std::int64_t>& row_bytes) {
  const auto last = [](std::int64_t size, std::int64_t step) { return static_cast<__int128>(size - 1) * step; };
  for (std::size_t i = 0; i < each.views.size(); ++i) {
    const View& view = each.views[i];
    const std::int64_t room = row_bytes[view.slot];
    const bool quantized = each.form && i == 2;
    if (quantized != (view.type == Type::kByte)) return false;
    if (each.kind == Kind::kLinear && !quantized) {
      if (view.type == Type::kInt || view.type != each.views[0].type) return false;
      if (!each.leading && !each.form && view.type != Type::kBf16) return false;  // others are not packed
    }
    if (each.kind == Kind::kLookUp && !quantized) {
      const Type due = i == 0 ? Type::kInt : each.form ? Type::kFloat : each.views[2].type;
      if (view.type != due || (i && each.inner > 1 && view.inner != 1)) return false;  // a row is copied as it lies
    }
    if (!room || each.kind == Kind::kLinear) continue;  // weights; rows of a linear layer have no steps
    __int128 end = last(each.inner, view.inner) + 1;
    for (std::size_t d = 0; d < kDims; ++d) end += last(each.sizes[d], view.outer[d]);
    const __int128 bytes = view.type == Type::kFloat ? 4 : view.type == Type::kInt ? 8 : 2;
    if (end * bytes + view.offset > room) return false;
  }
  const auto takes = [&](std::size_t i, __int128 elements) {
    const __int128 bytes = each.views[0].type == Type::kFloat ? 4 : 2;
    return each.views[i].offset + elements * each.sizes[kDims - 1] * bytes <= row_bytes[each.views[i].slot];
  };
  return each.kind != Kind::kLinear || (takes(0, each.inner) && takes(1, each.n));
}

gemm::Problem problem_of(const Instruction& each, const Slot* slots, std::size_t rows) {
  const auto at = [&](std::size_t i) { return slots[each.views[i].slot].at + each.views[i].offset; };
  return {static_cast<gemm::Type>(each.views[0].type),
          nullptr,
          at(2),
          each.views.size() > 3 ? at(3) : nullptr,
          at(1),
          rows * static_cast<std::size_t>(each.sizes[kDims - 1]),
          static_cast<std::size_t>(each.n),
          static_cast<std::size_t>(each.inner),
          static_cast<std::size_t>(each.leading),
          !each.leading,
          each.form ? &*each.form : nullptr};
}

struct Job {
  const Program* program;
  const Instruction *first, *last;
  const Slot* slots;
  std::int64_t rows, step;
  std::atomic<bool> good{true};
};

void run_piece(void* data, std::size_t piece, std::size_t) {
  auto& job = *static_cast<Job*>(data);
  const std::int64_t begin = static_cast<std::int64_t>(piece) * job.step, end = begin + job.step;
  if (!job.program->run(job.first, job.last, job.slots, begin, end < job.rows ? end : job.rows)) job.good = false;
}

}  // namespace

void read(Program& program, Reader& in) {
  program.given = static_cast<std::size_t>(in.next(0, 1 << 16));
  const std::int64_t own = in.next(0, 1 << 16), slots = static_cast<std::int64_t>(program.given) + own;
  for (std::int64_t i = 0; i < slots && !in.failed; ++i) program.row_bytes.push_back(in.next(0));
  for (std::int64_t i = 0; i < own && !in.failed; ++i) program.at.push_back(in.next(0));
  const std::int64_t count = in.next(0, 1 << 16);
  for (std::int64_t i = 0; i < count && !in.failed; ++i) {
    program.instructions.push_back(read_instruction(in, slots));
    program.instructions.back().row = program.calls->row;
    if (!in.failed && !fits(program.instructions.back(), program.row_bytes)) in.failed = true;
  }
}

bool execute(const Program& program, const Slot* slots, std::int64_t rows, std::size_t first, std::size_t last) {
  const Instruction* const all = program.instructions.data();
  for (std::size_t i = first; i < last;) {
    if (all[i].kind == Kind::kLinear) {
      const gemm::Problem p = problem_of(all[i], slots, static_cast<std::size_t>(rows));
      program.calls->linear(program.calls->engine, p, slots[all[i].views[0].slot].at + all[i].views[0].offset);
      ++i;
      continue;
    }
    std::size_t end = i;
    std::int64_t work = 0;
    for (; end < last && all[end].kind != Kind::kLinear; ++end)
      work += all[end].sizes[0] * all[end].sizes[1] * all[end].sizes[2] * all[end].inner *
              static_cast<std::int64_t>(1 + all[end].steps.size());
    const auto threads = static_cast<std::int64_t>(program.calls->threads);
    std::int64_t pieces = work * rows / kElementsOfAPiece;
    pieces = pieces < 1 ? 1 : pieces > 4 * threads ? 4 * threads : pieces;
    if (threads == 1) pieces = 1;
    const std::int64_t step = (rows + pieces - 1) / pieces;
    Job job{&program, all + i, all + end, slots, rows, step < 1 ? 1 : step};
    const auto count = static_cast<std::size_t>((rows + job.step - 1) / job.step);
    if (count == 1)
      run_piece(&job, 0, 0);
    else
      program.calls->run(program.calls->engine, run_piece, &job, count);
    if (!job.good) return false;
    i = end;
  }
  return true;
}

}  // namespace lamina::rows
