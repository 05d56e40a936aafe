// Tensors in safetensors files: a table of dtypes, and views without copies.
#include "files/tensors_file.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

#include "core/check.h"

namespace horner::files {

namespace {

struct Dtype {
  const char* name;
  at::ScalarType type;
};
constexpr Dtype kDtypes[] = {{"F64", at::kDouble},
                             {"F32", at::kFloat},
                             {"F16", at::kHalf},
                             {"BF16", at::kBFloat16},
                             {"F8_E4M3", at::kFloat8_e4m3fn},
                             {"F8_E5M2", at::kFloat8_e5m2},
                             {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                             {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                             {"F8_E8M0", at::kFloat8_e8m0fnu},
                             {"I64", at::kLong},
                             {"I32", at::kInt},
                             {"I16", at::kShort},
                             {"I8", at::kChar},
                             {"U64", at::kUInt64},
                             {"U32", at::kUInt32},
                             {"U16", at::kUInt16},
                             {"U8", at::kByte},
                             {"BOOL", at::kBool},
                             {"C64", at::kComplexFloat}};

at::Tensor view(const std::string& name, const safetensors::Array& a) {
  const auto* d = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                               [&](const Dtype& row) { return a.dtype == row.name; });
  check(d != std::end(kDtypes), "'", a.file->path().string(), "': tensor '", name,
        "': torch does not support dtype ", a.dtype);
  const auto options = at::TensorOptions(d->type);
  // Safe: the mapping is private and writable (files/files.h).
  auto* data = const_cast<std::byte*>(a.bytes.data());
  if (a.bytes.empty()) return at::empty(a.shape, options);
  if (reinterpret_cast<uintptr_t>(data) % c10::elementSize(d->type) == 0)
    return at::from_blob(data, a.shape, [file = a.file](void*) {}, options);
  at::Tensor out = at::empty(a.shape, options);  // the writer of the file did not align it
  std::copy(a.bytes.begin(), a.bytes.end(), static_cast<std::byte*>(out.data_ptr()));
  return out;
}

}  // namespace

TensorsFile load_tensors(const std::filesystem::path& path) {
  const safetensors::Contents contents = safetensors::read(path);
  TensorsFile out{.tensors = {}, .metadata = contents.metadata};
  for (const auto& [name, array] : contents.arrays) out.tensors.emplace(name, view(name, array));
  return out;
}

safetensors::Contents arrays_of(const TensorsFile& file, std::vector<at::Tensor>& kept) {
  safetensors::Contents out{.arrays = {}, .metadata = file.metadata};
  for (const auto& [name, tensor] : file.tensors) {
    check(tensor.defined(), "tensor '", name, "' is undefined and cannot be saved");
    const auto* d = std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const Dtype& row) {
      return tensor.scalar_type() == row.type;
    });
    check(d != std::end(kDtypes), "tensor '", name, "': safetensors does not support dtype ",
          c10::toString(tensor.scalar_type()));
    const at::Tensor whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous();
    kept.push_back(whole);
    const auto* data = static_cast<const std::byte*>(whole.const_data_ptr());
    out.arrays[name] = {
        .dtype = d->name, .shape = whole.sizes().vec(), .bytes = {data, whole.nbytes()}};
  }
  return out;
}

void save_tensors(const std::filesystem::path& path, const TensorsFile& file) {
  std::vector<at::Tensor> kept;
  safetensors::write(path, arrays_of(file, kept));
}

}  // namespace horner::files
