// Where the fields of a channel's struct lie, for those who fill and read it beyond C++.
#pragma once

#include <cstddef>
#include <vector>

#include "netstack/gin_channel.h"
#include "netstack/memory_channel.h"
#include "netstack/mlx5_channel.h"

namespace lamina::device {

struct Field {
  const char* name;  // as C++ names it
  std::size_t offset, bytes;
};

class Fields {
 public:
  explicit Fields(const void* base) : base_(static_cast<const char*>(base)) {}

  template <class T>
  void add(const char* name, const T& member) {
    list.push_back({name, std::size_t(reinterpret_cast<const char*>(&member) - base_), sizeof member});
  }

  std::vector<Field> list;

 private:
  const char* base_;
};

#define LAMINA_FIELD(name) fields.add(#name, c.name)

inline void add_fields(const Ends& c, Fields& fields) {
  LAMINA_FIELD(staging);
  LAMINA_FIELD(inbox);
  LAMINA_FIELD(abort);
  LAMINA_FIELD(out.count);
  LAMINA_FIELD(out.bytes);
  LAMINA_FIELD(in.count);
  LAMINA_FIELD(in.bytes);
  LAMINA_FIELD(zero);
  LAMINA_FIELD(granted);
  LAMINA_FIELD(published);
  LAMINA_FIELD(credited);
  LAMINA_FIELD(received);
  LAMINA_FIELD(released);
  LAMINA_FIELD(reported);
}

inline void add_fields(const memory::Channel& c, Fields& fields) {
  add_fields(static_cast<const Ends&>(c), fields);
  LAMINA_FIELD(near);
}

inline void add_fields(const mlx5::Channel& c, Fields& fields) {
  add_fields(static_cast<const Ends&>(c), fields);
  LAMINA_FIELD(queue.ring);
  LAMINA_FIELD(queue.record);
  LAMINA_FIELD(queue.doorbell);
  LAMINA_FIELD(queue.completions);
  LAMINA_FIELD(queue.seen);
  LAMINA_FIELD(queue.number);
  LAMINA_FIELD(queue.blocks);
  LAMINA_FIELD(queue.cqes);
  LAMINA_FIELD(queue.alternate);
  LAMINA_FIELD(queue.reserved);
  LAMINA_FIELD(queue.committed);
  LAMINA_FIELD(queue.completed);
  LAMINA_FIELD(queue.polled);
  LAMINA_FIELD(queue.doorbells);
  LAMINA_FIELD(queue.syndrome);
  LAMINA_FIELD(queue.held);
  LAMINA_FIELD(queue.near);
  LAMINA_FIELD(peer.address);
  LAMINA_FIELD(peer.key);
  LAMINA_FIELD(source.address);
  LAMINA_FIELD(source.key);
  LAMINA_FIELD(credits);
  LAMINA_FIELD(lane);
}

inline void add_fields(const gin::Channel& c, Fields& fields) {
  add_fields(static_cast<const Ends&>(c), fields);
  LAMINA_FIELD(communicator);
  LAMINA_FIELD(window);
  LAMINA_FIELD(peer);
  LAMINA_FIELD(to);
  LAMINA_FIELD(from);
  LAMINA_FIELD(context);
}

#undef LAMINA_FIELD

template <class Channel>
std::vector<Field> fields_of() {
  const Channel c{};
  Fields fields(&c);
  add_fields(c, fields);
  return fields.list;
}

}  // namespace lamina::device
