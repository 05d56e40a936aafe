// Tensors in safetensors files.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "files/safetensors.h"

namespace horner::files {

struct TensorsFile {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, std::string> metadata = {};
};

// Views of the mapped file, which they keep mapped: nothing is read before it is used. In-place
// writes change memory, never the file.
TensorsFile load_tensors(const std::filesystem::path&);

void save_tensors(const std::filesystem::path& file, const TensorsFile&);

// The same tensors as arrays, for safetensors::write_sharded: those on the CPU and contiguous
// without a copy. `kept` owns the copies of the others.
safetensors::Contents arrays_of(const TensorsFile&, std::vector<at::Tensor>& kept);

}  // namespace horner::files
