// safetensors files. Headers are not trusted: every size and offset is checked before use.
#include "files/safetensors.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <string_view>
#include <tuple>

#include "core/check.h"
#include "files/json.h"

namespace horner::files::safetensors {

namespace {

using Json = nlohmann::json;
using Path = std::filesystem::path;

constexpr uint64_t kMostHeader = 100'000'000;
constexpr size_t kAlignment = 8;

// Every dtype of the format, in bits. Files are written with the widest first, so that each array
// is aligned to its element size.
struct Dtype {
  std::string_view name;
  unsigned bits;
};
constexpr Dtype kDtypes[] = {{"C64", 64},    {"F64", 64},    {"I64", 64},        {"U64", 64},
                             {"F32", 32},    {"I32", 32},    {"U32", 32},        {"BF16", 16},
                             {"F16", 16},    {"I16", 16},    {"U16", 16},        {"F8_E4M3", 8},
                             {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8},
                             {"I8", 8},      {"U8", 8},      {"BOOL", 8},        {"F6_E2M3", 6},
                             {"F6_E3M2", 6}, {"F4", 4}};

const Dtype* find_dtype(std::string_view name) {
  const auto* at = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                [&](const Dtype& d) { return d.name == name; });
  return at == std::end(kDtypes) ? nullptr : at;
}

// The size of an array in bytes.
uint64_t size_of(const std::string& where, const std::string& dtype,
                 const std::vector<int64_t>& shape) {
  const Dtype* d = find_dtype(dtype);
  check(d, where, "unknown dtype '", dtype, "'");
  uint64_t bits = d->bits;
  for (const int64_t n : shape)
    check(n >= 0 && !__builtin_mul_overflow(bits, uint64_t(n), &bits), where,
          "shape overflows 64 bits");
  check(bits % 8 == 0, where, "elements do not fill whole bytes");
  return bits / 8;
}

std::string where(const Path& path, const std::string& name) {
  return "'" + path.string() + "': tensor '" + name + "': ";
}

// Parses JSON with at most `most_depth` nested values and without duplicate keys.
Json parse(const Path& path, std::string_view text, int most_depth) {
  std::vector<std::set<std::string>> keys;
  const auto watch = [&](int depth, Json::parse_event_t event, Json& name) {
    using enum Json::parse_event_t;
    if (event == object_start || event == array_start)
      check(depth < most_depth, "'", path.string(), "': JSON is nested too deeply");
    if (event == object_start) keys.emplace_back();
    if (event == object_end) keys.pop_back();
    if (event == key) {
      const auto& text = name.get_ref<const std::string&>();
      check(keys.back().insert(text).second, "'", path.string(), "': duplicate key '", text, "'");
    }
    return true;
  };
  try {
    return Json::parse(text, watch);
  } catch (const Json::exception& e) {
    fail("'", path.string(), "' is not valid JSON: ", problem_of(e));
  }
}

uint64_t unsigned_number(const std::string& where, const Json& value, const char* what) {
  check(value.is_number_unsigned(), where, what, " must be non-negative integers, got ",
        value.dump());
  return value.get<uint64_t>();
}

const Json& member(const std::string& where, const Json& object, const char* name) {
  check(object.is_object() && object.contains(name), where, "missing '", name, "'");
  return object[name];
}

// An entry of a header: an array in `buffer`, and its offset.
struct Placed {
  Array array;
  uint64_t begin;
};
Placed placed(const std::string& where, const Json& row, Bytes buffer) {
  Placed out;
  const Json& dtype = member(where, row, "dtype");
  check(dtype.is_string(), where, "'dtype' must be a string, got ", dtype.dump());
  out.array.dtype = dtype.get<std::string>();
  const Json& shape = member(where, row, "shape");
  check(shape.is_array(), where, "'shape' must be a list, got ", shape.dump());
  for (const Json& n : shape) {
    const uint64_t size = unsigned_number(where, n, "sizes in 'shape'");
    check(size <= uint64_t(INT64_MAX), where, "shape overflows 64 bits");
    out.array.shape.push_back(int64_t(size));
  }
  const Json& offsets = member(where, row, "data_offsets");
  check(offsets.is_array() && offsets.size() == 2, where, "'data_offsets' must be two numbers");
  out.begin = unsigned_number(where, offsets[0], "'data_offsets'");
  const uint64_t end = unsigned_number(where, offsets[1], "'data_offsets'");
  check(out.begin <= end && end <= buffer.size(), where, "data ends at byte ", end, " of ",
        buffer.size(), ": the file is truncated or its header is wrong");
  const uint64_t wanted = size_of(where, out.array.dtype, out.array.shape);
  check(end - out.begin == wanted, where, "shape requires ", wanted, " bytes, the file has ",
        end - out.begin);
  out.array.bytes = buffer.subspan(out.begin, wanted);
  return out;
}

Metadata metadata_of(const Path& path, const Json& value) {
  check(value.is_object(), "'", path.string(), "': __metadata__ must be an object of strings");
  Metadata out;
  for (const auto& [key, text] : value.items()) {
    check(text.is_string(), "'", path.string(), "': __metadata__ '", key, "' must be a string");
    out[key] = text.get<std::string>();
  }
  return out;
}

Contents read_file(const Path& path) {
  const auto file = std::make_shared<const MappedFile>(path);
  const Bytes all = file->bytes();
  const std::string name = "'" + path.string() + "'";
  uint64_t header = 0;
  check(all.size() >= sizeof header, name, " is not a safetensors file: it has ", all.size(),
        " bytes");
  std::memcpy(&header, all.data(), sizeof header);
  check(header <= kMostHeader && header <= all.size() - sizeof header, name,
        " is truncated or not a safetensors file: its header would have ", header,
        " bytes, the file has ", all.size());
  const std::string_view text = file->text().substr(sizeof header, header);
  check(text.starts_with('{'), name, " is not a safetensors file: its header is not a JSON object");
  const Json rows = parse(path, text, 3);
  const Bytes buffer = all.subspan(sizeof header + header);

  Contents out;
  std::vector<std::tuple<uint64_t, uint64_t, const std::string*>> extents;  // begin, end, key
  for (const auto& [key, row] : rows.items()) {
    if (key == "__metadata__") {
      out.metadata = metadata_of(path, row);
      continue;
    }
    Placed p = placed(where(path, key), row, buffer);
    p.array.file = file;
    const auto at = out.arrays.emplace(key, std::move(p.array)).first;
    extents.emplace_back(p.begin, p.begin + at->second.bytes.size(), &at->first);
  }
  std::sort(extents.begin(), extents.end());
  uint64_t end = 0;
  for (const auto& [begin, next, key] : extents) {
    check(begin == end, where(path, *key), "data begins at byte ", begin,
          ", the previous tensor ends at ", end);
    end = next;
  }
  check(end == buffer.size(), name, ": tensors end at byte ", end, " of ", buffer.size());
  return out;
}

Contents read_index(const Path& path) {
  const MappedFile file(path);
  const Json index = parse(path, file.text(), 3);
  const std::string name = "'" + path.string() + "': ";
  const Json& places = member(name, index, "weight_map");
  check(places.is_object(), name, "'weight_map' must be an object");
  std::map<std::string, Contents> shards;
  Contents out;
  for (const auto& [key, place] : places.items()) {
    check(place.is_string(), where(path, key), "file name must be a string");
    const std::string shard = place.get<std::string>();
    check(!shard.empty() && shard.find('/') == std::string::npos, where(path, key), "'", shard,
          "' must be the name of a file next to the index");
    auto at = shards.find(shard);
    if (at == shards.end()) at = shards.emplace(shard, read_file(path.parent_path() / shard)).first;
    const auto found = at->second.arrays.find(key);
    check(found != at->second.arrays.end(), where(path, key), "not found in '", shard, "'");
    out.arrays.emplace(key, found->second);
  }
  for (auto& [shard, contents] : shards) out.metadata.merge(contents.metadata);
  return out;
}

std::string header_of(const Path& path, const std::vector<const Arrays::value_type*>& order,
                      const Metadata& metadata) {
  files::Json rows = files::Json::object();
  if (!metadata.empty()) rows["__metadata__"] = metadata;
  uint64_t begin = 0;
  for (const auto* item : order) {
    const auto& [name, array] = *item;
    check(name != "__metadata__", where(path, name), "the format reserves this name");
    const uint64_t wanted = size_of(where(path, name), array.dtype, array.shape);
    check(array.bytes.size() == wanted, where(path, name), "shape requires ", wanted,
          " bytes, got ", array.bytes.size());
    rows[name] = {
        {"dtype", array.dtype}, {"shape", array.shape}, {"data_offsets", {begin, begin + wanted}}};
    begin += wanted;
  }
  try {
    std::string out = rows.dump();
    out.append((kAlignment - out.size() % kAlignment) % kAlignment, ' ');
    check(out.size() <= kMostHeader, "'", path.string(), "': header exceeds 100 MB");
    return out;
  } catch (const Json::exception& e) {
    fail("cannot write '", path.string(), "': ", problem_of(e));
  }
}

}  // namespace

Contents read(const Path& path) {
  if (!std::filesystem::is_directory(path))
    return path.extension() == ".json" ? read_index(path) : read_file(path);
  const Path one = path / "model.safetensors", many = path / "model.safetensors.index.json";
  if (std::filesystem::exists(one)) return read_file(one);
  check(std::filesystem::exists(many), "'", path.string(),
        "' has neither model.safetensors nor model.safetensors.index.json");
  return read_index(many);
}

void write(const Path& file, const Contents& contents) {
  std::vector<const Arrays::value_type*> order;
  for (const auto& item : contents.arrays) {
    check(find_dtype(item.second.dtype), where(file, item.first), "unknown dtype '",
          item.second.dtype, "'");
    order.push_back(&item);
  }
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return find_dtype(a->second.dtype)->bits > find_dtype(b->second.dtype)->bits;
  });
  const std::string header = header_of(file, order, contents.metadata);
  const uint64_t size = header.size();
  NewFile out(file);
  out.write(std::as_bytes(std::span(&size, 1)));
  out.write(header);
  for (const auto* item : order) out.write(item->second.bytes);
  out.commit();
}

void write_sharded(const Path& folder, const Contents& contents, uint64_t most) {
  std::vector<Arrays> shards(1);
  uint64_t size = 0, total = 0;
  for (const auto& [name, array] : contents.arrays) {
    const uint64_t bytes = array.bytes.size();
    if (size > 0 && size + bytes > most) {
      shards.emplace_back();
      size = 0;
    }
    shards.back().emplace(name, array);
    size += bytes;
    total += bytes;
  }
  const Path index = folder / "model.safetensors.index.json";
  if (shards.size() == 1) {
    write(folder / "model.safetensors", contents);
    std::filesystem::remove(index);
    return;
  }
  check(shards.size() < 100'000, "'", folder.string(),
        "': at most 99999 shards are supported, got ", shards.size());
  auto places = files::Json::object();
  for (size_t i = 0; i < shards.size(); ++i) {
    char name[64];
    std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    write(folder / name, {shards[i], contents.metadata});
    for (const auto& item : shards[i]) places[item.first] = name;
  }
  write_json(index, {{"metadata", {{"total_size", total}}}, {"weight_map", places}});
  std::filesystem::remove(folder / "model.safetensors");  // read() would prefer it to the shards
}

}  // namespace horner::files::safetensors
