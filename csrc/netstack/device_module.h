// What a native module tells Python of device.h: statuses, where things lie in an inbox, the layout of a channel.
// Included after Python.h.
#pragma once

#include "netstack/layout.h"

namespace lamina::device {

// channel_layout() -> (bytes of the struct, {field: (offset, bytes)})
template <class Channel>
PyObject* channel_layout(PyObject*, PyObject*) {
  PyObject* fields = PyDict_New();
  for (const Field& field : fields_of<Channel>()) {
    PyObject* place = fields ? Py_BuildValue("nn", Py_ssize_t(field.offset), Py_ssize_t(field.bytes)) : nullptr;
    if (!place || PyDict_SetItemString(fields, field.name, place)) Py_CLEAR(fields);
    Py_XDECREF(place);
  }
  return fields ? Py_BuildValue("nN", Py_ssize_t(sizeof(Channel)), fields) : nullptr;
}

// inbox_bytes(slots, slot_bytes): of one direction, inbox and staging alike.
inline PyObject* inbox_bytes(PyObject*, PyObject* args) {
  Slots slots;
  if (!PyArg_ParseTuple(args, "KK", &slots.count, &slots.bytes)) return nullptr;
  return PyLong_FromUnsignedLongLong(slots.inbox_bytes());
}

// slot_stride(slot_bytes): from one slot of an inbox to the next, header included.
inline PyObject* slot_stride(PyObject*, PyObject* args) {
  Slots slots{1, 0};
  if (!PyArg_ParseTuple(args, "K", &slots.bytes)) return nullptr;
  return PyLong_FromUnsignedLongLong(slots.stride());
}

// 0, or -1 with an exception.
inline int add_constants(PyObject* module) {
  const struct {
    const char* name;
    long value;
  } constants[] = {{"OK", kOk},
                   {"PENDING", kPending},
                   {"TIMEOUT", kTimeout},
                   {"ABORTED", kAborted},
                   {"FAULT", kFault},
                   {"FAILED", kFailed},
                   {"SIGNAL_AT", kSignalAt},
                   {"CREDIT_AT", kCreditAt},
                   {"BULK_CREDIT_AT", kBulkCreditAt},
                   {"SLOTS_AT", kSlotsAt},
                   {"LINE", kLine}};
  for (const auto& constant : constants)
    if (PyModule_AddIntConstant(module, constant.name, constant.value)) return -1;
  return 0;
}

}  // namespace lamina::device
