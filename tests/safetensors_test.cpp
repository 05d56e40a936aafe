// safetensors files: what is written is read back; what is broken gives an error and nothing else.
#include "files/safetensors.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <random>

#include "core/check.h"
#include "files/tensors_file.h"

namespace horner {
namespace {

using Path = std::filesystem::path;

// A folder for one test.
struct Folder : testing::Test {
  Path folder = std::filesystem::temp_directory_path() /
                ("horner_safetensors_" + std::to_string(::getpid()) + "_" +
                 testing::UnitTest::GetInstance()->current_test_info()->name());
  Folder() { std::filesystem::create_directories(folder); }
  ~Folder() override { std::filesystem::remove_all(folder); }
};
using Safetensors = Folder;

std::string contents(const Path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}
void put(const Path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), std::streamsize(bytes.size()));
}
std::string with_header(const std::string& header, size_t data = 0) {
  const uint64_t size = header.size();
  std::string out(reinterpret_cast<const char*>(&size), sizeof size);
  return out + header + std::string(data, 'x');
}
template <class F>
std::string message(F call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "no error";
}

const auto says = [](const char* a, const char* b, const std::string& wanted,
                     const std::string& got) { return testing::IsSubstring(a, b, wanted, got); };

files::TensorsFile some_tensors() {
  at::manual_seed(1);
  return {.tensors = {{"a.weight", at::randn({3, 5})},
                      {"b", at::randn({7}).to(at::kBFloat16)},
                      {"c", at::randint(0, 2, {2, 3}).to(at::kBool)},
                      {"empty", at::empty({0, 4}, at::kHalf)},
                      {"long", at::arange(6).view({2, 3})},
                      {"scalar", at::scalar_tensor(2.5, at::kDouble)},
                      {"turned", at::randn({4, 2}).t()}},
          .metadata = {{"format", "pt"}, {"grüße", "\"line\"\n"}}};
}
void expect_equal(const files::TensorsFile& a, const files::TensorsFile& b) {
  EXPECT_EQ(a.metadata, b.metadata);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (const auto& [name, tensor] : a.tensors) {
    ASSERT_TRUE(b.tensors.contains(name)) << name;
    EXPECT_EQ(tensor.scalar_type(), b.tensors.at(name).scalar_type()) << name;
    EXPECT_TRUE(at::equal(tensor, b.tensors.at(name))) << name;
  }
}

TEST_F(Safetensors, RoundTrip) {
  const Path file = folder / "x.safetensors";
  const auto wrote = some_tensors();
  files::save_tensors(file, wrote);
  auto read = files::load_tensors(file);
  expect_equal(wrote, read);
  // An in-place change stays in memory; saving over the mapped file leaves its views alone.
  const at::Tensor view = read.tensors.at("a.weight");
  view.add_(1);
  expect_equal(wrote, files::load_tensors(file));
  files::save_tensors(file, read);
  EXPECT_TRUE(at::equal(files::load_tensors(file).tensors.at("a.weight"),
                        wrote.tensors.at("a.weight") + 1));
  read = {};
  EXPECT_TRUE(at::equal(view, wrote.tensors.at("a.weight") + 1)) << "a view keeps its file mapped";
}

TEST_F(Safetensors, EveryArrayIsAligned) {
  const Path file = folder / "x.safetensors";
  files::save_tensors(file, some_tensors());
  for (const auto& [name, array] : files::safetensors::read(file).arrays) {
    const size_t count = std::max<size_t>(1, size_t(c10::multiply_integers(array.shape)));
    const size_t element = std::max<size_t>(1, array.bytes.size() / count);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(array.bytes.data()) % element, 0u) << name;
  }
  // Another writer's file need not be: then the tensor is a copy.
  put(file, with_header(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}} )"
                        "   ",
                        8));
  EXPECT_EQ(files::load_tensors(file).tensors.at("a").sizes(), at::IntArrayRef({2}));
}

TEST_F(Safetensors, Shards) {
  const auto wrote = some_tensors();
  std::vector<at::Tensor> kept;
  const auto arrays = files::arrays_of(wrote, kept);
  files::safetensors::write_sharded(folder, arrays, 40);
  EXPECT_TRUE(std::filesystem::exists(folder / "model.safetensors.index.json"));
  EXPECT_GT(std::distance(std::filesystem::directory_iterator(folder), {}), 3);
  expect_equal(wrote, files::load_tensors(folder));
  expect_equal(wrote, files::load_tensors(folder / "model.safetensors.index.json"));
  files::safetensors::write_sharded(folder, arrays);
  EXPECT_FALSE(std::filesystem::exists(folder / "model.safetensors.index.json"));
  expect_equal(wrote, files::load_tensors(folder));
}

TEST_F(Safetensors, ShardErrors) {
  std::vector<at::Tensor> kept;
  files::safetensors::write_sharded(folder, files::arrays_of(some_tensors(), kept), 40);
  const Path index = folder / "model.safetensors.index.json";
  const std::string good = contents(index);
  const auto of = [&](const std::string& text) {
    put(index, text);
    return message([&] { files::safetensors::read(folder); });
  };
  EXPECT_PRED_FORMAT2(says, "'q'", of(R"({"weight_map":{"q":"../x"}})"));
  EXPECT_PRED_FORMAT2(says, "tensor 'q': not found in 'model-00001",
                      of(R"({"weight_map":{"q":"model-00001-of-00004.safetensors"}})"));
  EXPECT_PRED_FORMAT2(says, "No such file", of(R"({"weight_map":{"q":"gone"}})"));
  EXPECT_PRED_FORMAT2(says, "missing 'weight_map'", of("{}"));
  EXPECT_PRED_FORMAT2(says, "is not valid JSON", of(good.substr(0, 100)));
  EXPECT_EQ(of(good), "no error");
}

TEST_F(Safetensors, Errors) {
  const struct {
    std::string header;
    const char* wanted;
  } cases[] = {
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})",
       "requires 8 bytes, the file has 4"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", "truncated"},
      {R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}})", "data begins at byte 2"},
      {R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]}})", "tensors end at byte 6 of 8"},
      {R"({"a":{"dtype":"U8","shape":[6],"data_offsets":[0,6]},)"
       R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
       "'b': data begins at byte 4, the previous tensor ends at 6"},
      {R"({"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},)"
       R"("a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}})",
       "duplicate key 'a'"},
      {R"({"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}})", "unknown dtype 'F33'"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", "got -2"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", "got 2.0"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})",
       "shape overflows 64 bits"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})",
       "shape overflows 64 bits"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", "truncated"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}})", "two numbers"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", "missing 'data_offsets'"},
      {R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}})", "whole bytes"},
      {R"({"a":3})", "missing 'dtype'"},
      {R"({"__metadata__":{"a":1}})", "__metadata__ 'a' must be a string"},
      {R"([[[[[[[[[[]]]]]]]]]])", "header is not a JSON object"},
      {R"({"a":[[[[[[[[[[]]]]]]]]]]})", "nested too deeply"},
      {R"({"a":)", "is not valid JSON"},
  };
  const Path file = folder / "x.safetensors";
  for (const auto& c : cases) {
    put(file, with_header(c.header, 8));
    const std::string got = message([&] { files::safetensors::read(file); });
    EXPECT_PRED_FORMAT2(says, c.wanted, got) << c.header;
    EXPECT_PRED_FORMAT2(says, "x.safetensors", got) << c.header;
  }
  put(file, "short");
  EXPECT_PRED_FORMAT2(says, "it has 5 bytes", message([&] { files::safetensors::read(file); }));
  put(file, std::string(8, '\xff') + "{}");
  EXPECT_PRED_FORMAT2(says, "header would have", message([&] { files::safetensors::read(file); }));
  EXPECT_PRED_FORMAT2(says, "No such", message([&] { files::safetensors::read(folder / "gone"); }));
  EXPECT_PRED_FORMAT2(says, "has neither", message([&] { files::safetensors::read(folder); }));
  files::safetensors::Contents bad{.arrays = {{"a", {.dtype = "F32", .shape = {3}, .bytes = {}}}}};
  EXPECT_PRED_FORMAT2(says, "requires 12 bytes",
                      message([&] { files::safetensors::write(file, bad); }));
  EXPECT_PRED_FORMAT2(says, "No such file",
                      message([&] { files::save_tensors(folder / "no" / "x", some_tensors()); }));
}

// A limit on the size of files stands for a full disk: the system's calls fail in the same way.
TEST_F(Safetensors, AFullDiskLeavesTheOldFile) {
  const Path file = folder / "x.safetensors";
  const auto old = some_tensors();
  files::save_tensors(file, old);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ::getrlimit(RLIMIT_FSIZE, &before);
  const rlimit small{4096, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string got =
      message([&] { files::save_tensors(file, {.tensors = {{"a", at::zeros({10'000})}}}); });
  ::setrlimit(RLIMIT_FSIZE, &before);
  EXPECT_PRED_FORMAT2(says, "cannot write '" + file.string() + "': File too large", got);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder), {}), 1) << "no leftovers";
  expect_equal(old, files::load_tensors(file));
}

TEST_F(Safetensors, RandomTruncationsAndBitFlips) {
  const Path file = folder / "x.safetensors";
  files::save_tensors(file, some_tensors());
  const std::string good = contents(file);
  uint64_t header = 0;
  std::memcpy(&header, good.data(), sizeof header);
  std::mt19937 random(1);
  int errors = 0;
  unsigned sum = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string bytes = good;
    if (i % 4 == 0)
      bytes.resize(random() % bytes.size());
    else
      for (unsigned n = 1 + random() % 3; n-- > 0;)
        bytes[random() % (i % 4 == 1 ? bytes.size() : header + 8)] ^= char(1 << random() % 8);
    put(file, bytes);
    try {
      for (const auto& [name, array] : files::safetensors::read(file).arrays)
        for (const std::byte b : array.bytes) sum += unsigned(b);  // every byte can be read
      files::load_tensors(file);
    } catch (const Error&) {
      ++errors;
    }
  }
  EXPECT_GT(errors, 500);
  EXPECT_LT(errors, 1000);
  EXPECT_GT(sum, 0u);
}

}  // namespace
}  // namespace horner
