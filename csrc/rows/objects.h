// What the Python objects of lamina.ops.rows._rows have in common. Included after Python.h.
#pragma once

#include "module_types.h"
#include "rows/table.h"
#include "tables.h"

namespace lamina::rows {

using ProgramObject = Holder<Program, 1>;  // keeps the engine, for its threads

using Types = ModuleTypes<2>;  // program, chain

extern PyType_Spec chain_spec;

}  // namespace lamina::rows
