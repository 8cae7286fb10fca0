// What the files here give the module, also where it was built without libibverbs's headers.
#pragma once

#include "netstack/native.h"

namespace lamina {

constexpr const char* kUnbuilt =
    "it was built without infiniband/verbs.h: apt-get install libibverbs-dev, then install Lamina again";

// open_rdma_end(device, port, gid_index, pkey_index, service_level, traffic_class, ack_timeout, outbound, inbound)
// -> RdmaEnd
PyObject* open_rdma_end(PyObject* module, PyObject* args);
// rdma_gids(device, port) -> [(index, GID, kind)], kind as ibv_gid_type
PyObject* rdma_gids(PyObject* module, PyObject* args);
PyObject* verbs_fault(PyObject* module, PyObject*);  // why there is no RdmaEnd; empty: there is
bool add_rdma_end(State* state, PyObject* module);   // the type; false with an exception set

// open_kernel_pair(device, port, gid_index, pkey_index, service_level, traffic_class, ack_timeout, blocks, staging,
// inbox, rings) -> KernelPair
// The last three are (address, bytes, file of a dma-buf or -1); rings of no bytes are libmlx5's.
PyObject* open_kernel_pair(PyObject* module, PyObject* args);
PyObject* rings_bytes(PyObject* module, PyObject* blocks);  // rings_bytes(blocks)
PyObject* mlx5_fault(PyObject* module, PyObject*);  // why there is no KernelPair; empty: there is
bool add_kernel_pair(State* state, PyObject* module);  // the type; false with an exception set

}  // namespace lamina
