// Used if torch has no CUDA, or if nccl.h was not found.
#include "core/check.h"
#include "train/comm_link.h"

namespace horner::train {

Backend nccl_backend(const Store&, const Ranks&, std::chrono::milliseconds) {
  fail(why_no_nccl());
}

const char* why_no_nccl() {
  return "this build has no NCCL; it requires a torch with CUDA, a CUDA compiler and nccl.h";
}

}  // namespace horner::train
