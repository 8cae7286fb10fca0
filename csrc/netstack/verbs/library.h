// libibverbs (rdma-core), loaded when it is first asked for: nothing links against it, and hosts without RDMA need none.
// Its types are those of the headers at compile time, which its own promise keeps fit for newer libraries.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "netstack/dynamic.h"

namespace lamina::verbs {

// As ibv_gid_entry, which rdma-core has since 33.
struct GidEntry {
  ibv_gid gid;
  std::uint32_t index, port, kind, interface;
};

struct Library {
  DynamicLibrary file{"libibverbs.so.1"};
  decltype(&::ibv_get_device_list) get_device_list = file.find("ibv_get_device_list");
  decltype(&::ibv_free_device_list) free_device_list = file.find("ibv_free_device_list");
  decltype(&::ibv_get_device_name) get_device_name = file.find("ibv_get_device_name");
  decltype(&::ibv_open_device) open_device = file.find("ibv_open_device");
  decltype(&::ibv_close_device) close_device = file.find("ibv_close_device");
  int (*query_port)(ibv_context*, std::uint8_t port, _compat_ibv_port_attr*) = file.find("ibv_query_port");
  decltype(&::ibv_query_gid) query_gid = file.find("ibv_query_gid");
  decltype(&::ibv_alloc_pd) alloc_pd = file.find("ibv_alloc_pd");
  decltype(&::ibv_dealloc_pd) dealloc_pd = file.find("ibv_dealloc_pd");
  ibv_mr* (*reg_mr)(ibv_pd*, void*, std::size_t, int access) = file.find("ibv_reg_mr");
  decltype(&::ibv_dereg_mr) dereg_mr = file.find("ibv_dereg_mr");
  decltype(&::ibv_create_comp_channel) create_comp_channel = file.find("ibv_create_comp_channel");
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel = file.find("ibv_destroy_comp_channel");
  decltype(&::ibv_create_cq) create_cq = file.find("ibv_create_cq");
  decltype(&::ibv_destroy_cq) destroy_cq = file.find("ibv_destroy_cq");
  decltype(&::ibv_get_cq_event) get_cq_event = file.find("ibv_get_cq_event");
  decltype(&::ibv_ack_cq_events) ack_cq_events = file.find("ibv_ack_cq_events");
  decltype(&::ibv_create_qp) create_qp = file.find("ibv_create_qp");
  decltype(&::ibv_modify_qp) modify_qp = file.find("ibv_modify_qp");
  decltype(&::ibv_destroy_qp) destroy_qp = file.find("ibv_destroy_qp");
  decltype(&::ibv_get_async_event) get_async_event = file.find("ibv_get_async_event");
  decltype(&::ibv_ack_async_event) ack_async_event = file.find("ibv_ack_async_event");
  decltype(&::ibv_event_type_str) event_type_str = file.find("ibv_event_type_str");
  decltype(&::ibv_create_ah) create_ah = file.find_newer("ibv_create_ah");
  decltype(&::ibv_destroy_ah) destroy_ah = file.find_newer("ibv_destroy_ah");
  // Null before rdma-core 34.
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, std::uint64_t offset, std::size_t, std::uint64_t address, int fd,
                           int access) = file.find_newer("ibv_reg_dmabuf_mr");
  // Null before rdma-core 33.
  ssize_t (*query_gid_table)(ibv_context*, GidEntry*, std::size_t most, std::uint32_t flags,
                             std::size_t entry_bytes) = file.find_newer("_ibv_query_gid_table");
  char fault[256];  // why it cannot be used; empty: it can

  static const Library& get() {  // of this process
    static const Library library;
    return library;
  }

  // Null, with errno, where the device cannot be opened; ENODEV: it is not listed.
  ibv_context* open(const char* name) const {
    int count = 0;
    ibv_device** const list = get_device_list(&count);
    if (!list) return nullptr;
    ibv_device* device = nullptr;
    for (int i = 0; i < count; ++i)
      if (!std::strcmp(get_device_name(list[i]), name)) device = list[i];
    errno = ENODEV;
    ibv_context* const context = device ? open_device(device) : nullptr;
    const int error = errno;
    free_device_list(list);
    errno = error;
    return context;
  }

 private:
  Library() { file.explain(fault, "it is not rdma-core's"); }
};

}  // namespace lamina::verbs
