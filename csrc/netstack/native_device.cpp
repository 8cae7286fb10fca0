// What lamina.netstack.host._netstack tells of channels that kernels use. On its own: names of device.h, such as
// Status, are names of engines too.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "netstack/device_module.h"
#include "netstack/verbs/formats.h"

namespace lamina {

PyMethodDef device_methods[] = {{"inbox_bytes", device::inbox_bytes, METH_VARARGS, nullptr},
                                {"slot_stride", device::slot_stride, METH_VARARGS, nullptr},
                                {"channel_layout", device::channel_layout<memory::Channel>, METH_NOARGS, nullptr},
                                {"mlx5_layout", device::channel_layout<mlx5::Channel>, METH_NOARGS, nullptr},
                                {"gin_layout", device::channel_layout<gin::Channel>, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

bool add_device(PyObject* module) {
  return !PyModule_AddFunctions(module, device_methods) && !device::add_constants(module);
}

}  // namespace lamina
