// lamina.ops.rows._rows: programs of program.h as Python objects. lamina/ops/rows/_rows.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstring>
#include <string>

#include "cpu.h"
#include "rows/objects.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::rows;

// Program(engine, table, variant)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* engine;
  Table table;
  const char* variant;
  if (!PyArg_ParseTuple(args, "Oy*s", &engine, &table.view, &variant)) return nullptr;
  const std::string name = variant;
  return ProgramObject::make(type, [&](ProgramObject& self) {
    Program& program = *self.value;
    self.keep(0, engine);
    if (!(program.calls = calls_of<const gemm::Calls>(engine))) return false;
    if (!(name.empty() || name == "avx2" ? avx2_usable() : name == "avx512" && avx512_usable()))
      return PyErr_Format(PyExc_ValueError, "this CPU has no %s", *variant ? variant : "AVX2, FMA and F16C") != nullptr;
    program.run = avx512_usable() && name != "avx2" ? kAvx512 : kAvx2;
    return table.read([&](Reader& in) { read(program, in); });
  });
}

// run(rows, first, last, arena, *given)
PyObject* program_run(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  const Program& program = *ProgramObject::of(object)->value;
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
  std::vector<Slot> slots;
  std::vector<char*> addresses;  // of the arena, then of what is given
  if (!read_addresses(args + 3, 1 + static_cast<Py_ssize_t>(program.given), &addresses)) return nullptr;
  for (std::size_t i = 0; i < program.row_bytes.size(); ++i) {
    char* const at = i < program.given ? addresses[i + 1] : addresses[0] + program.at[i - program.given] * rows;
    slots.push_back({at, program.row_bytes[i]});
  }
  bool good = true;
  const bool enough = without_gil([&] {
    good = execute(program, slots.data(), rows, static_cast<std::size_t>(head[1]), static_cast<std::size_t>(head[2]));
  });
  if (!enough) return nullptr;
  if (!good) return PyErr_Format(PyExc_IndexError, "a row looks up what the table has not");
  Py_RETURN_NONE;
}

PyMethodDef program_methods[] = {{"run", method(program_run), METH_FASTCALL, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyType_Slot program_slots[] = {{Py_tp_new, slot(make)},
                               {Py_tp_dealloc, slot(ProgramObject::dealloc)},
                               {Py_tp_methods, program_methods},
                               {0, nullptr}};
PyType_Spec program_spec = {"lamina.ops.rows._rows.Program", sizeof(ProgramObject), 0, Py_TPFLAGS_DEFAULT,
                            program_slots};

int exec(PyObject* module) { return Types::add(module, {&program_spec, &chain_spec}); }

PyModuleDef_Slot slots[] = {{Py_mod_exec, slot(exec)}, {0, nullptr}};
PyModuleDef definition = Types::definition("Slices as tables of instructions.", slots);

}  // namespace

PyMODINIT_FUNC PyInit__rows() { return PyModuleDef_Init(&definition); }
