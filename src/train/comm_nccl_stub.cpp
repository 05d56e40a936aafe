// Where torch has no CUDA, or no nccl.h was found when this was built.
#include "core/check.h"
#include "train/comm_link.h"

namespace horner::train {

Backend nccl_backend(const Store&, const Ranks&, std::chrono::milliseconds) {
  fail(why_no_nccl());
}

const char* why_no_nccl() {
  return "this build is without NCCL: it takes a torch with CUDA, a CUDA compiler and nccl.h";
}

}  // namespace horner::train
