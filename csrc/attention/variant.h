// The table of one set of instructions. Included last, in the same namespace.

// Known when this is compiled: nothing of these instructions runs to make it. `bf16`: of queries of bf16, by what is
// stored.
constexpr Variant variant(const char* name, bool (*usable)(),
                          const std::array<RunTask, kStored>& bf16 = runs<BFloat16>) {
  return {name,
          usable,
          {runs<float>, bf16, runs<Half>},
          merge_partials,
          {finish<float>, finish<BFloat16>, finish<Half>},
          {bounds<float>, bounds<BFloat16>, bounds<Half>},
          {tallies<float>, tallies<BFloat16>, tallies<Half>},
          read};
}
