// lamina.rows._native: programs of program.h as Python objects. lamina/rows/_native.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <new>
#include <string>

#include "reader.h"
#include "rows/program.h"

namespace {

using namespace lamina;
using namespace lamina::rows;

constexpr std::int64_t kElementsOfAPiece = 1 << 14;  // a thread is woken for no less

struct Program {
  std::vector<Instruction> instructions;
  std::vector<std::int64_t> row_bytes;  // of each slot: those given, then those of the arena
  std::vector<std::int64_t> at;         // of each slot of the arena, for each row
  std::size_t given = 0;
  Run run = nullptr;
  const gemm::Calls* calls = nullptr;
};

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
    view.type = static_cast<Type>(in.next(0, 3));
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
  return each;
}

// Whether all that an instruction touches of rows lies in them, and its linear layer has one type.
bool fits(const Instruction& each, const std::vector<std::int64_t>& row_bytes) {
  const auto last = [](std::int64_t size, std::int64_t step) { return static_cast<__int128>(size - 1) * step; };
  for (const View& view : each.views) {
    const std::int64_t room = row_bytes[view.slot];
    if (each.kind == Kind::kLinear && (view.type == Type::kInt || view.type != each.views[0].type)) return false;
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

void read(Program& program, Reader& in) {
  program.given = static_cast<std::size_t>(in.next(0, 1 << 16));
  const std::int64_t own = in.next(0, 1 << 16), slots = static_cast<std::int64_t>(program.given) + own;
  for (std::int64_t i = 0; i < slots && !in.failed; ++i) program.row_bytes.push_back(in.next(0));
  for (std::int64_t i = 0; i < own && !in.failed; ++i) program.at.push_back(in.next(0));
  const std::int64_t count = in.next(0, 1 << 16);
  for (std::int64_t i = 0; i < count && !in.failed; ++i) {
    program.instructions.push_back(read_instruction(in, slots));
    if (!in.failed && !fits(program.instructions.back(), program.row_bytes)) in.failed = true;
  }
  if (in.at != in.end) in.failed = true;
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
          static_cast<std::size_t>(each.leading)};
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

// Instructions first .. last - 1. False where a row looks up what the table has not. Throws std::bad_alloc.
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

struct Object {
  PyObject_HEAD Program* program;
  PyObject* engine;  // kept for its threads
};

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* engine;
  Py_buffer table;
  const char* variant;
  if (!PyArg_ParseTuple(args, "Oy*s", &engine, &table, &variant)) return nullptr;
  PyObject* const capsule = PyObject_CallMethod(engine, "calls", nullptr);
  const auto* calls =
      capsule ? static_cast<const gemm::Calls*>(PyCapsule_GetPointer(capsule, gemm::Calls::kName)) : nullptr;
  Py_XDECREF(capsule);
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  Object* self = nullptr;
  const std::string name = variant;
  const bool known = name.empty() ? avx2 : name == "avx2" ? avx2 : name == "avx512" && avx512;
  if (!calls) {
  } else if (!known) {
    PyErr_Format(PyExc_ValueError, "this CPU has no %s", *variant ? variant : "AVX2, FMA and F16C");
  } else if ((self = reinterpret_cast<Object*>(type->tp_alloc(type, 0)))) {
    self->program = new (std::nothrow) Program;
    self->engine = Py_NewRef(engine);
    const auto* numbers = static_cast<const std::int64_t*>(table.buf);
    Reader in{numbers, numbers + table.len / 8};
    if (self->program) {
      self->program->calls = calls;
      self->program->run = avx512 && name != "avx2" ? kAvx512 : kAvx2;
      read(*self->program, in);
    }
    if (!self->program || in.failed) {
      if (self->program)
        PyErr_Format(PyExc_ValueError, "number %zd of the table makes no sense",
                     static_cast<Py_ssize_t>(in.at - numbers));
      else
        PyErr_NoMemory();
      Py_CLEAR(self);
    }
  }
  PyBuffer_Release(&table);
  return reinterpret_cast<PyObject*>(self);
}

void dealloc(PyObject* object) {
  auto* const self = reinterpret_cast<Object*>(object);
  delete self->program;
  Py_XDECREF(self->engine);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// run(rows, first, last, arena, *given)
PyObject* program_run(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  const Program& program = *reinterpret_cast<Object*>(object)->program;
  if (count != static_cast<Py_ssize_t>(4 + program.given))
    return PyErr_Format(PyExc_TypeError, "run takes %zu arguments, not %zd", 4 + program.given, count);
  long long head[3];
  for (int i = 0; i < 3; ++i) {
    head[i] = PyLong_AsLongLong(args[i]);
    if (head[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  const auto rows = static_cast<std::int64_t>(head[0]);
  if (rows < 1 || head[1] < 0 || head[1] > head[2] || head[2] > static_cast<long long>(program.instructions.size()))
    return PyErr_Format(PyExc_ValueError, "no instructions %lld to %lld on %lld rows", head[1], head[2], head[0]);
  Slot few[64];
  std::vector<Slot> many;
  Slot* slots = few;
  if (program.row_bytes.size() > 64) {
    many.resize(program.row_bytes.size());
    slots = many.data();
  }
  char* arena = nullptr;
  for (std::size_t i = 0; i <= program.given; ++i) {
    const unsigned long long at = PyLong_AsUnsignedLongLong(args[3 + i]);
    if (at == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return nullptr;
    char* const pointer = reinterpret_cast<char*>(static_cast<std::uintptr_t>(at));
    if (i)
      slots[i - 1] = {pointer, program.row_bytes[i - 1]};
    else
      arena = pointer;
  }
  for (std::size_t i = program.given; i < program.row_bytes.size(); ++i)
    slots[i] = {arena + program.at[i - program.given] * rows, program.row_bytes[i]};
  bool fits = true, good = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    good = execute(program, slots, rows, static_cast<std::size_t>(head[1]), static_cast<std::size_t>(head[2]));
  } catch (const std::bad_alloc&) {
    fits = false;
  }
  Py_END_ALLOW_THREADS;
  if (!fits) return PyErr_NoMemory();
  if (!good) return PyErr_Format(PyExc_IndexError, "a row looks up what the table has not");
  Py_RETURN_NONE;
}

PyMethodDef program_methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(program_run)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

int exec(PyObject* module) {
  PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                         {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_methods, program_methods},
                         {0, nullptr}};
  PyType_Spec spec = {"lamina.rows._native.Program", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) return -1;
  const int status = PyModule_AddObjectRef(module, "Program", type);
  Py_DECREF(type);
  return status;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, nullptr, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
