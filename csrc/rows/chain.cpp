// A slice as one call: its units one after another, and what they send in between. See
// lamina/ops/rows/program.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "rows/objects.h"
#include "rows/send.h"
#include "without_gil.h"

namespace lamina::rows {
namespace {

enum class Part : std::int64_t { kRun, kQ, kKV };

// kRun: `program` on `values`, first weights' addresses, then those given and those made. kQ: values[0]; kKV: both.
struct Link {
  Part part;
  const Program* program = nullptr;
  std::vector<char*> weights;
  std::vector<std::size_t> values;
  std::size_t layer = 0;
  std::vector<std::size_t> row_bytes;  // of values that are sent
};

// Values: arguments, results, and those in the arena, `at` bytes after its beginning for each row. After them, from `own`
// on, is what a program keeps there.
struct Chain {
  std::size_t outside = 0;  // given and results
  std::vector<std::int64_t> at;
  std::int64_t own = 0;
  std::vector<Link> links;
};

using ChainObject = Holder<Chain, 1>;  // keeps the programs

enum class End { kGood, kGaveUp, kLookUp };

End run(const Chain& chain, const Send* send, std::int64_t rows, char* arena, char* const* outside) {
  std::vector<Slot> slots;
  const auto value = [&](std::size_t i) {
    return i < chain.outside ? outside[i] : arena + chain.at[i - chain.outside] * rows;
  };
  for (const Link& link : chain.links) {
    if (link.part != Part::kRun) {
      const char* tensors[2];
      for (std::size_t i = 0; i < link.values.size(); ++i) tensors[i] = value(link.values[i]);
      const auto call = link.part == Part::kQ ? send->q : send->kv;
      const bool sent = call(send->self, link.layer, rows, tensors, link.row_bytes.data());
      if (!sent) return End::kGaveUp;
      continue;
    }
    const Program& program = *link.program;
    slots.clear();
    for (char* weight : link.weights) slots.push_back({weight, 0});
    for (const std::size_t i : link.values) slots.push_back({value(i), 0});
    for (std::size_t i = program.given; i < program.row_bytes.size(); ++i)
      slots.push_back({arena + (chain.own + program.at[i - program.given]) * rows, 0});
    for (std::size_t i = 0; i < slots.size(); ++i) slots[i].row_bytes = program.row_bytes[i];
    if (!execute(program, slots.data(), rows, 0, program.instructions.size())) return End::kLookUp;
  }
  return End::kGood;
}

void read_links(Chain& chain, Reader& in, const std::vector<const Program*>& programs) {
  chain.outside = std::size_t(in.next(0, 1 << 16));
  chain.own = in.next(0);
  chain.at = in.list(0, INT64_MAX);
  const auto values = std::int64_t(chain.outside + chain.at.size());
  const std::int64_t links = in.next(0, 1 << 16);
  for (std::int64_t i = 0; i < links && !in.failed; ++i) {
    Link link;
    link.part = Part(in.next(0, 2));
    if (link.part == Part::kRun) {
      const std::int64_t number = in.next(0, std::int64_t(programs.size()) - 1);
      for (const std::int64_t address : in.list(INT64_MIN, INT64_MAX))
        link.weights.push_back(reinterpret_cast<char*>(static_cast<std::uintptr_t>(address)));
      if (!in.failed) link.program = programs[std::size_t(number)];
    } else {
      link.layer = std::size_t(in.next(0, 1 << 16));
    }
    for (const std::int64_t value : in.list(0, values - 1)) link.values.push_back(std::size_t(value));
    if (link.part != Part::kRun)
      for (const std::int64_t bytes : in.list(1, INT64_MAX)) link.row_bytes.push_back(std::size_t(bytes));
    const std::size_t wanted = link.part == Part::kQ ? 1 : 2;
    if (link.program ? link.weights.size() + link.values.size() != link.program->given
                     : link.values.size() != wanted || link.row_bytes.size() != wanted)
      in.failed = true;
    chain.links.push_back(std::move(link));
  }
}

// Chain(programs, table)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* programs;
  Table table;
  PyTypeObject* const program_type = Types::of(type)[0];
  if (!PyArg_ParseTuple(args, "O!y*", &PyTuple_Type, &programs, &table.view)) return nullptr;
  return ChainObject::make(type, [&](ChainObject& self) {
    std::vector<const Program*> known;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(programs); ++i) {
      PyObject* each = PyTuple_GET_ITEM(programs, i);
      if (Py_TYPE(each) != program_type) return PyErr_Format(PyExc_TypeError, "a chain is of Programs") != nullptr;
      known.push_back(ProgramObject::of(each)->value);
    }
    self.keep(0, programs);
    return table.read([&](Reader& in) { read_links(*self.value, in, known); });
  });
}

// run(send, rows, arena, *outside)
PyObject* chain_run(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  const Chain& chain = *ChainObject::of(object)->value;
  if (count != Py_ssize_t(3 + chain.outside))
    return PyErr_Format(PyExc_TypeError, "run takes %zu arguments, not %zd", 3 + chain.outside, count);
  const Send* send = nullptr;
  if (args[0] != Py_None && !(send = static_cast<const Send*>(PyCapsule_GetPointer(args[0], Send::kName))))
    return nullptr;
  for (const Link& link : chain.links)
    if (!send && link.part != Part::kRun)
      return PyErr_Format(PyExc_ValueError, "a chain sends, and there is no receiver");
  const long long rows = PyLong_AsLongLong(args[1]);
  if (rows == -1 && PyErr_Occurred()) return nullptr;
  if (rows < 1) return PyErr_Format(PyExc_ValueError, "%lld rows", rows);
  std::vector<char*> addresses;
  if (!read_addresses(args + 2, count - 2, &addresses)) return nullptr;
  if (send && !send->begin(send->self)) return nullptr;
  End end = End::kGood;
  const bool enough = without_gil([&] { end = run(chain, send, rows, addresses[0], addresses.data() + 1); });
  if ((send && !send->end(send->self)) || !enough) return nullptr;
  if (end != End::kGood) return PyErr_Format(PyExc_IndexError, "a row looks up what the table has not");
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"run", method(chain_run), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot type_slots[] = {
    {Py_tp_new, slot(make)}, {Py_tp_dealloc, slot(ChainObject::dealloc)}, {Py_tp_methods, methods}, {0, nullptr}};

}  // namespace

PyType_Spec chain_spec = {"lamina.ops.rows._rows.Chain", sizeof(ChainObject), 0, Py_TPFLAGS_DEFAULT, type_slots};

}  // namespace lamina::rows
