// Where threads of ours run in a process whose threads OpenMP binds.
#pragma once
#include <thread>

#if defined(__linux__)
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <vector>
#endif

namespace lamina {

// A thread inherits the cores of the one that starts it. Where OpenMP binds threads (OMP_PROC_BIND) that is a single
// core, on which all threads of a pool would take turns: `thread`, just started, gets all places of OpenMP's instead.
// Where nothing is bound, nothing changes: cores that a user gave to the process are inherited.
inline void leave_bound_core(std::thread& thread) {
#if defined(__linux__)
  // torch brings OpenMP; a module of ours that is used without torch has none.
  const auto proc_bind = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_proc_bind"));
  const auto num_places = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_num_places"));
  const auto num_procs = reinterpret_cast<int (*)(int)>(dlsym(RTLD_DEFAULT, "omp_get_place_num_procs"));
  const auto proc_ids = reinterpret_cast<void (*)(int, int*)>(dlsym(RTLD_DEFAULT, "omp_get_place_proc_ids"));
  if (!proc_bind || !num_places || !num_procs || !proc_ids || !proc_bind()) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (int place = 0; place < num_places(); ++place) {
    std::vector<int> ids(static_cast<std::size_t>(num_procs(place)));
    proc_ids(place, ids.data());
    for (int id : ids) CPU_SET(static_cast<std::size_t>(id), &cores);
  }
  if (CPU_COUNT(&cores)) pthread_setaffinity_np(thread.native_handle(), sizeof cores, &cores);
#else
  static_cast<void>(thread);
#endif
}

}  // namespace lamina
