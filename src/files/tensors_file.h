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

// The tensors are views of the mapped file and keep it mapped: pages are read on first use.
// In-place writes never reach the file.
TensorsFile load_tensors(const std::filesystem::path&);

void save_tensors(const std::filesystem::path& file, const TensorsFile&);

// The same tensors as arrays, for safetensors::write_sharded. Contiguous tensors on the CPU are not
// copied; `kept` owns the copies of others.
safetensors::Contents arrays_of(const TensorsFile&, std::vector<at::Tensor>& kept);

}  // namespace horner::files
