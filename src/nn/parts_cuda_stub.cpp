// Replaces parts_cuda.cpp in builds without CUDA.
#include "nn/parts_launch.h"

namespace horner::nn::parts {

const Launch* cuda_launch() {
  return nullptr;
}

}  // namespace horner::nn::parts
