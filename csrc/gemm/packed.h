// Weights that are packed, one panel after the other. Included once for each instruction set, after its
// `panels`, inside its namespace.

const char* panel_at(const void* w, std::size_t n, std::size_t k_size) {
  return static_cast<const char*>(w) + n / panels::kCols * panels::bytes(k_size);
}

std::size_t packed_bytes(std::size_t cols, std::size_t k_size) {
  return (cols + panels::kCols - 1) / panels::kCols * panels::bytes(k_size);
}

void pack(const Problem& p, std::size_t begin, std::size_t end, void* to) {
  for (std::size_t n = begin; n < end; n += panels::kCols)
    panels::pack(p, n, const_cast<char*>(panel_at(to, n, p.k_size)));
}
