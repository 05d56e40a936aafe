// safetensors files: named arrays in one file, mapped rather than read.
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
  std::string dtype;  // as the format spells it: "F32", "BF16", …
  std::vector<int64_t> shape;
  Bytes bytes;                                  // row-major, little-endian
  std::shared_ptr<const MappedFile> file = {};  // what `bytes` points into, when it was read
};

using Arrays = std::map<std::string, Array>;
using Metadata = std::map<std::string, std::string>;

struct Contents {
  Arrays arrays;
  Metadata metadata = {};
};

// `path`: a .safetensors file, an index of several (*.index.json), or a folder with
// model.safetensors or model.safetensors.index.json. All is checked before any of it is returned;
// an error names the file and the array.
Contents read(const std::filesystem::path& path);

void write(const std::filesystem::path& file, const Contents&);

// model.safetensors in `folder`, or when the arrays have more than `most` bytes several files of
// at most that and their index, which is written last.
void write_sharded(const std::filesystem::path& folder, const Contents&,
                   uint64_t most = 5'000'000'000);

}  // namespace horner::files::safetensors
