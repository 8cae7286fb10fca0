// Memory, views of it, and records: what a channel hands to Python.
#include "native.h"

#include <structmember.h>
#include <sys/mman.h>

#include <cstddef>

namespace lamina {
namespace {

struct Memory {
  PyObject_HEAD std::uint8_t* base;
  std::size_t bytes;
};

struct View {
  PyObject_HEAD PyObject* memory;
  std::uint8_t* data;
  Py_ssize_t bytes;
  int readonly;
};

void memory_dealloc(PyObject* self) {
  auto* memory = reinterpret_cast<Memory*>(self);
  if (memory->base) munmap(memory->base, memory->bytes);
  free_object(self);
}

void view_dealloc(PyObject* self) {
  Py_XDECREF(reinterpret_cast<View*>(self)->memory);
  free_object(self);
}

int view_getbuffer(PyObject* self, Py_buffer* buffer, int flags) {
  auto* view = reinterpret_cast<View*>(self);
  return PyBuffer_FillInfo(buffer, self, view->data, view->bytes, view->readonly, flags);
}

PyType_Slot memory_slots[] = {{Py_tp_dealloc, slot(memory_dealloc)}, {0, nullptr}};
PyType_Slot view_slots[] = {{Py_tp_dealloc, slot(view_dealloc)}, {Py_bf_getbuffer, slot(view_getbuffer)}, {0, nullptr}};
constexpr unsigned kHidden = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
PyType_Spec memory_spec = {"lamina.netstack.host._netstack.Memory", sizeof(Memory), 0, kHidden, memory_slots};
PyType_Spec view_spec = {"lamina.netstack.host._netstack.View", sizeof(View), 0, kHidden, view_slots};

}  // namespace

bool make_memory_types(State* state, PyObject* module) {
  state->memory_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &memory_spec, nullptr));
  state->view_type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, &view_spec, nullptr));
  return state->memory_type && state->view_type;
}

PyObject* map_memory(State* state, int fd, std::uint64_t bytes) {
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (base == MAP_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
  auto* memory = allocate<Memory>(state->memory_type);
  if (!memory) {
    munmap(base, bytes);
    return nullptr;
  }
  memory->base = static_cast<std::uint8_t*>(base);
  memory->bytes = bytes;
  return reinterpret_cast<PyObject*>(memory);
}

std::uint8_t* memory_base(PyObject* memory) { return reinterpret_cast<Memory*>(memory)->base; }

PyObject* make_view(State* state, PyObject* memory, std::uint8_t* data, std::uint64_t bytes, bool readonly) {
  auto* view = allocate<View>(state->view_type);
  if (!view) return nullptr;
  view->memory = Py_NewRef(memory);
  view->data = data;
  view->bytes = Py_ssize_t(bytes);
  view->readonly = readonly;
  PyObject* result = PyMemoryView_FromObject(reinterpret_cast<PyObject*>(view));
  Py_DECREF(view);
  return result;
}

bool find_record(PyObject* module, const char* type, const char* const (&fields)[3], Record* record) {
  PyObject* found = PyObject_GetAttrString(module, type);
  if (!found) return false;
  record->type = reinterpret_cast<PyTypeObject*>(found);
  for (int i = 0; i < 3 && fields[i]; ++i) {
    PyObject* member = PyObject_GetAttrString(found, fields[i]);
    if (!member) return false;
    const bool slotted = Py_IS_TYPE(member, &PyMemberDescr_Type);
    if (slotted) record->offsets[i] = reinterpret_cast<PyMemberDescrObject*>(member)->d_member->offset;
    Py_DECREF(member);
    if (!slotted) return PyErr_Format(PyExc_TypeError, "%s.%s is not a slot", type, fields[i]), false;
  }
  return true;
}

}  // namespace lamina
