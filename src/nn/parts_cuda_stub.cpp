// In place of parts_cuda.cpp where torch is built without CUDA.
#include "nn/parts_launch.h"

namespace horner::nn::parts {

const Launch* cuda_launch() {
  return nullptr;
}

}  // namespace horner::nn::parts
