// safetensors files: named arrays in one file, mapped into memory.
//   u64 size of the header · header {"name": {"dtype", "shape", "data_offsets"}, …} · the arrays
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "files/files.h"

namespace horner::files::safetensors {

struct Array {
  std::string dtype;  // the format's name: "F32", "BF16", …
  std::vector<int64_t> shape;
  Bytes bytes;                                  // row-major, little-endian
  std::shared_ptr<const MappedFile> file = {};  // the file that `bytes` points into, if any
};

using Arrays = std::map<std::string, Array>;
using Metadata = std::map<std::string, std::string>;

struct Contents {
  Arrays arrays;
  Metadata metadata = {};
};

// `path`: a .safetensors file, an index of several (*.index.json), or a folder with
// model.safetensors or model.safetensors.index.json. Checks everything before it returns; errors
// name the file and the array.
Contents read(const std::filesystem::path& path);

void write(const std::filesystem::path& file, const Contents&);

// Writes model.safetensors into `folder`. If the arrays exceed `most` bytes, writes several files
// of at most that size, then their index.
void write_sharded(const std::filesystem::path& folder, const Contents&,
                   uint64_t most = 5'000'000'000);

}  // namespace horner::files::safetensors
