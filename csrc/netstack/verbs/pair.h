// Python's side of a queue pair until it is connected. Then a kernel or a thread posts to it.
#pragma once

#include "end.h"
#include "native.h"

namespace lamina {

// card() -> (gid, lid, number, psn, mtu, inbox bytes, key, address)
inline PyObject* card_of(const verbs::End& end) {
  const verbs::Route& r = end.route();
  const verbs::Inbox inbox = end.inbox();
  return Py_BuildValue("y#HIIIKIK", r.gid, Py_ssize_t(sizeof r.gid), r.lid, r.number, r.psn, r.mtu,
                       Number(end.inbox_bytes()), inbox.key, Number(inbox.address));
}

// connect(gid, lid, number, psn, mtu, key, address), of the peer's card.
inline PyObject* connect(verbs::End& end, PyObject* args) {
  const char* gid;
  Py_ssize_t gid_bytes;
  verbs::Route route{};
  verbs::Inbox inbox{};
  Number address;
  if (!PyArg_ParseTuple(args, "y#HIIIIK", &gid, &gid_bytes, &route.lid, &route.number, &route.psn, &route.mtu,
                        &inbox.key, &address))
    return nullptr;
  if (gid_bytes != Py_ssize_t(sizeof route.gid)) return PyErr_Format(PyExc_ValueError, "a GID has 16 bytes");
  std::memcpy(route.gid, gid, sizeof route.gid);
  inbox.address = address;
  bool connected;
  Py_BEGIN_ALLOW_THREADS;
  connected = end.connect(route, inbox);
  Py_END_ALLOW_THREADS;
  if (!connected) return PyErr_Format(PyExc_OSError, "cannot %s", end.fault());
  Py_RETURN_NONE;
}

}  // namespace lamina
