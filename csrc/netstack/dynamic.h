// A shared library that is loaded when it is first needed, so that nothing links against it, and its functions by name.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <initializer_list>

namespace lamina {

class DynamicLibrary {
 public:
  // The first of `names` that this host has. It stays loaded: its functions outlive this object.
  DynamicLibrary(std::initializer_list<const char*> names) {
    for (const char* name : names)
      if (!file_) file_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    whole_ = file_;
  }

  // A function, of the type that it is assigned to.
  struct Found {
    void* address;
    template <class Function>
    operator Function() const {
      return reinterpret_cast<Function>(address);
    }
  };

  // Null from the first function on that is not there.
  Found find(const char* name) {
    void* const address = find_newer(name).address;
    whole_ = address;
    return {address};
  }

  // Null where it is not there; the library counts as whole without it.
  Found find_newer(const char* name) const { return {whole_ ? dlsym(file_, name) : nullptr}; }

  // Why it cannot be used, or nothing. `stranger`: the reason for a file that lacks the functions.
  template <std::size_t kBytes>
  void explain(char (&fault)[kBytes], const char* stranger) const {
    const char* const why = whole_ ? "" : dlerror();
    std::snprintf(fault, kBytes, "%s", why ? why : stranger);
  }

 private:
  void* file_ = nullptr;
  bool whole_ = false;
};

}  // namespace lamina
