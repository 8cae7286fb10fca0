// Reads a table of 64-bit numbers that Python has made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace lamina {

// `failed` once the numbers end too early or make no sense.
struct Reader {
  const std::int64_t* at;
  const std::int64_t* end;
  bool failed = false;

  std::int64_t next(std::int64_t low = INT64_MIN, std::int64_t high = INT64_MAX) {
    if (at == end || *at < low || *at > high) failed = true;
    return failed ? 0 : *at++;
  }
  double real() {
    const std::int64_t bits = next();
    double value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  // As many numbers as the first one says.
  std::vector<std::int64_t> list(std::int64_t low, std::int64_t high) {
    const std::int64_t count = next(0, end - at);
    std::vector<std::int64_t> values;
    for (std::int64_t i = 0; i < count && !failed; ++i) values.push_back(next(low, high));
    return values;
  }
};

}  // namespace lamina
