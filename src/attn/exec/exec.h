// The executions. Private to attn/: everyone else calls attend().
#pragma once

#include "attn/attend.h"

namespace horner::attn::exec {

extern const Execution reference, fused_cpu, rows_cpu;

}  // namespace horner::attn::exec
