// Initial weights, which are the same for every variant of a seed; damaged model folders: a
// truncated file is an error, a flipped bit an error or a model that runs, never a crash.
#include "nn/checkpoint.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <random>

#include "attn/catalog.h"
#include "core/check.h"
#include "small_llama.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace horner::nn {
namespace {

using Path = std::filesystem::path;

struct Folder : testing::Test {
  Path folder =
      std::filesystem::temp_directory_path() / ("horner_model_" + std::to_string(getpid()));
  ~Folder() override { std::filesystem::remove_all(folder); }
};

Json llama() {
  Json config = small_llama();
  config["horner_variant"] = {"l2", "gated_decay"};
  return config;
}
Json gemma() {
  Json j = llama();
  j["model_type"] = "gemma3_text", j["head_dim"] = 4, j["query_pre_attn_scalar"] = 4;
  j["sliding_window"] = 8, j["hidden_activation"] = "gelu_pytorch_tanh";
  j["tie_word_embeddings"] = true;
  j.erase("horner");
  return j;
}
Json olmo2() {
  Json j = llama();
  j["model_type"] = "olmo2";
  j.erase("horner");
  return j;
}
Json gpt2() {
  return {{"model_type", "gpt2"},
          {"n_embd", 8},
          {"n_head", 2},
          {"n_layer", 2},
          {"n_positions", 32},
          {"vocab_size", 20},
          {"activation_function", "gelu_new"},
          {"layer_norm_epsilon", 1e-5}};
}

// Bytes, a merge and a special token.
Json tokenizer() {
  Json vocab = Json::object();
  unsigned others = 256;
  for (unsigned b = 0; b < 256; ++b) {
    const bool printable = (b > ' ' && b <= '~') || (b >= 0xA1 && b != 0xAD);
    std::string name;
    text::append(name, printable ? b : others++);
    vocab[name] = b;
  }
  vocab["th"] = 256;
  const Json level{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}};
  const Json end{{"id", 257}, {"content", "<end>"}, {"special", true}, {"normalized", false}};
  return {{"version", "1.0"},
          {"added_tokens", Json::array({end})},
          {"decoder", level},
          {"pre_tokenizer", level},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array({"t h"})}}}};
}

// Reads every weight.
void use(const Path& folder) {
  const c10::NoGradGuard without_gradients;
  const Model m = load_model(folder);
  logits(m, hidden(m, at::arange(3, at::kLong).unsqueeze(0)));
}
void use_tokenizer(const Path& folder) {
  const text::Tokenizer t(folder);
  t.decode(t.encode("The other thing, then.\n"), false);
}

// How many of so many damages to `file` gave an error; anything but an error or a success ends the
// test.
int errors_of(const Path& folder, const char* file, int damages, bool truncate,
              void (*use)(const Path&)) {
  const std::string good = contents(folder / file);
  const size_t end = good.find_last_not_of("\n ") + 1;  // what is after it is not missed
  std::mt19937 random(7);
  int errors = 0;
  for (int i = 0; i < damages; ++i) {
    std::string bad = good;
    if (truncate)
      bad.resize(random() % (good.ends_with('\n') ? end : good.size()));
    else
      for (unsigned n = 1 + random() % 3; n-- > 0;)
        bad[random() % bad.size()] ^= char(1 << random() % 8);
    put(folder / file, bad);
    try {
      use(folder);
    } catch (const Error&) {
      ++errors;
    } catch (const std::exception& e) {
      ADD_FAILURE() << file << ", damage " << i << ": " << e.what();
    }
  }
  put(folder / file, good);
  return errors;
}

std::map<std::string, at::Tensor> by_name(Model m) {
  std::map<std::string, at::Tensor> out;
  for (const Slot& s : slots(m)) out[s.unique_name()] = *s.at;
  return out;
}

// Every pair of variants, of a rotary family, one with joined tensors and one with tied heads.
TEST(Start, VariantsOfASeedShareTheirWeights) {
  for (Json config : {llama(), gpt2(), gemma()}) {
    std::map<std::string, std::pair<std::string, at::Tensor>> first;  // who had it first, and it
    int shared = 0;
    for (const attn::Variant& v : attn::variants()) {
      if (v.spec.bias || attn::is<attn::Prefix>(v.spec.mask)) continue;  // no model makes these
      config["horner_variant"] = v.name;
      if (config.contains("sliding_window") && !attn::is<attn::Causal>(v.spec.mask) &&
          !attn::is<attn::Window>(v.spec.mask)) {  // no mask is both
        EXPECT_THROW(model_config(config), Error) << v.name;
        continue;
      }
      for (const auto& [name, x] : by_name(random_model(model_config(config), 5))) {
        const auto [at, fresh] = first.try_emplace(name, v.name, x);
        const auto& [other, same] = at->second;
        if (fresh || same.sizes() != x.sizes()) continue;
        if (name.ends_with(".slope")) continue;  // those of ALiBi and RetNet differ: not drawn
        EXPECT_TRUE(at::equal(x, same)) << name << " of " << v.name << " and " << other;
        ++shared;
      }
    }
    EXPECT_GT(shared, 1000);
    const auto other = by_name(random_model(model_config(config), 6));
    for (const auto& [name, x] : other)
      EXPECT_NE(x.dim() == 2, at::equal(x, first.at(name).second)) << name;
  }
}

// One tensor neither shares values with another nor depends on those that are drawn before it.
TEST(Start, TensorsAreIndependent) {
  Model m = random_model(model_config(gpt2()), 5);
  std::vector<Slot> all = slots(m);
  std::map<std::string, at::Tensor> backwards;
  for (auto s = all.rbegin(); s != all.rend(); ++s)
    backwards[s->unique_name()] = random_start(*s, 5);
  for (const auto& [name, x] : by_name(m)) EXPECT_TRUE(at::equal(x, backwards[name])) << name;
  std::map<float, std::string> seen;
  for (const Slot& s : all) {
    if (s.shape.size() != 2) continue;
    const auto [at, fresh] = seen.try_emplace(s.at->flatten()[0].item<float>(), s.unique_name());
    EXPECT_TRUE(fresh) << s.unique_name() << " begins as " << at->second;
  }
}

TEST_F(Folder, OfOneVariantStartsAnother) {
  for (Json config : {llama(), olmo2(), gpt2()}) {
    const Model saved = random_model(model_config(config), 3);
    save_model(saved, folder);
    config["horner_variant"] = "gated";
    const ModelConfig other = model_config(config);
    Model m = load_model(folder, other, 5), fresh = random_model(other, 5);
    EXPECT_TRUE(at::equal(m.embedding, saved.embedding));
    for (const Slot& s : slots(m)) EXPECT_EQ(s.at->sizes(), at::IntArrayRef(s.shape)) << s.name;
    for (const auto& [name, x] : m.layers[0].variant)
      EXPECT_TRUE(at::equal(x, fresh.layers[0].variant[name])) << name;
    put(folder / "config.json", config.dump());
    EXPECT_THROW(load_model(folder), Error);  // a folder must hold all that it says it has
  }
}

TEST_F(Folder, DamagedOnesGiveErrors) {
  constexpr int kTruncations = 120, kFlips = 280;
  for (const Json& config : {llama(), olmo2(), gemma(), gpt2()}) {
    save_model(random_model(model_config(config), 3), folder);
    put(folder / "tokenizer.json", tokenizer().dump());
    use(folder), use_tokenizer(folder);
    for (const char* file : {"config.json", "model.safetensors"}) {
      EXPECT_EQ(errors_of(folder, file, kTruncations, true, use), kTruncations) << file;
      EXPECT_GT(errors_of(folder, file, kFlips, false, use), kFlips / 10) << file;
    }
    use(folder);
  }
  EXPECT_EQ(errors_of(folder, "tokenizer.json", kTruncations, true, use_tokenizer), kTruncations);
  EXPECT_GT(errors_of(folder, "tokenizer.json", kFlips, false, use_tokenizer), kFlips / 10);
}

}  // namespace
}  // namespace horner::nn
