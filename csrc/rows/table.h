// A table of instructions that was read, and what runs it.
#pragma once

#include "reader.h"
#include "rows/program.h"

namespace lamina::rows {

struct Program {
  std::vector<Instruction> instructions;
  std::vector<std::int64_t> row_bytes;  // of each slot: those given, then those of the arena
  std::vector<std::int64_t> at;         // of each slot of the arena, for each row
  std::size_t given = 0;
  Run run = nullptr;
  const gemm::Calls* calls = nullptr;
};

// `in.failed` where the numbers are no table.
void read(Program& program, Reader& in);

// Instructions first .. last - 1 on rows of `slots`. False where a row looks up what the table has not. Throws
// std::bad_alloc.
bool execute(const Program& program, const Slot* slots, std::int64_t rows, std::size_t first, std::size_t last);

}  // namespace lamina::rows
