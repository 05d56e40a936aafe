// Reads tokenizer.json strictly: an unknown field or value is an error that names it.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "files/files.h"
#include "text/json_reader.h"
#include "text/model.h"
#include "text/utf8.h"

namespace horner::text {

namespace {

using Json = nlohmann::json;

// A value of the file and its path.
struct Field {
  const Json& json;
  std::string path;

  Field at(const std::string& key) const {
    check(json.is_object(), path, " must be an object");
    check(json.contains(key), path, ".", key, " is missing");
    return {json[key], path + "." + key};
  }
  bool has(const char* key) const {
    return json.is_object() && json.contains(key) && !json[key].is_null();
  }
  std::string string() const {
    check(json.is_string(), path, " must be a string, got ", shown());
    return json.get<std::string>();
  }
  bool boolean() const {
    check(json.is_boolean(), path, " must be true or false, got ", shown());
    return json.get<bool>();
  }
  uint64_t number(uint64_t below) const {
    check(json.is_number_unsigned() && json.get<uint64_t>() < below, path,
          " must be an integer below ", below, ", got ", shown());
    return json.get<uint64_t>();
  }
  std::vector<Field> list() const {
    check(json.is_array(), path, " must be a list");
    std::vector<Field> out;
    for (size_t i = 0; i < json.size(); ++i)
      out.push_back({json[i], path + "[" + std::to_string(i) + "]"});
    return out;
  }
  bool flag(const char* key, bool otherwise) const {
    return has(key) ? at(key).boolean() : otherwise;
  }
  void only(std::initializer_list<const char*> known) const {
    check(json.is_object(), path, " must be an object");
    for (const auto& item : json.items())
      check(std::find(known.begin(), known.end(), item.key()) != known.end(), path, ".", item.key(),
            " is not supported");
  }
  [[noreturn]] void refuse() const { fail(path, ": ", shown(), " is not supported"); }
  std::string shown() const {
    const std::string all = json.dump(-1, ' ', false, Json::error_handler_t::replace);
    return all.size() > 80 ? all.substr(0, 80) + "…" : all;
  }
};

// Adds a step, or every step of a Sequence, to `out`.
template <class Out>
using Add = void (*)(const Field&, const std::string& type, Out&);
template <class Out>
void add_steps(const Field& f, const char* parts, Add<Out> add, Out& out, int depth = 0) {
  check(depth < 8, f.path, " is nested too deeply");
  if (f.at("type").string() != "Sequence") return add(f, f.at("type").string(), out);
  f.only({"type", parts});
  for (const Field& step : f.at(parts).list()) add_steps(step, parts, add, out, depth + 1);
}

Regex regex(const Field& f) {
  f.only({"Regex", "String"});
  if (f.has("String")) {
    check(!f.at("String").string().empty(), f.path, ".String must not be empty");
    return Regex::literal(f.path, f.at("String").string());
  }
  return Regex::pattern(f.path, f.at("Regex").string());
}

void add_normalizer(const Field& f, const std::string& type, std::vector<Normalizer>& out) {
  if (type == "NFC") {
    f.only({"type"});
    out.emplace_back(Nfc{});
  } else if (type == "Replace") {
    f.only({"type", "pattern", "content"});
    Replace r{regex(f.at("pattern")), f.at("content").string()};
    if (f.at("pattern").has("String")) {
      const std::string text = f.at("pattern").at("String").string();
      if (text.size() == 1) r.single = text[0];
    }
    out.emplace_back(std::move(r));
  } else if (type == "Prepend") {
    f.only({"type", "prepend"});
    out.emplace_back(Prepend{f.at("prepend").string()});
  } else {
    f.at("type").refuse();
  }
}

// The value of a name.
template <class T>
T choice(const Field& f, std::initializer_list<std::pair<const char*, T>> all) {
  for (const auto& [name, value] : all)
    if (f.string() == name) return value;
  f.refuse();
}

Metaspace metaspace(const Field& f) {
  f.only({"type", "replacement", "prepend_scheme", "split", "add_prefix_space", "str_rep"});
  Metaspace out{f.at("replacement").string(), Scheme::always, f.flag("split", true)};
  size_t at = 0;
  check(!out.replacement.empty() && (next(out.replacement, at), at == out.replacement.size()),
        f.path, ".replacement must be one character");
  if (f.has("prepend_scheme"))
    out.prepend = choice<Scheme>(
        f.at("prepend_scheme"),
        {{"always", Scheme::always}, {"first", Scheme::first}, {"never", Scheme::never}});
  if (!f.flag("add_prefix_space", true)) out.prepend = Scheme::never;
  return out;
}

Behaviour behaviour(const Field& f) {
  return choice<Behaviour>(f, {{"Isolated", Behaviour::isolated},
                               {"Removed", Behaviour::removed},
                               {"MergedWithPrevious", Behaviour::merged_with_previous},
                               {"MergedWithNext", Behaviour::merged_with_next},
                               {"Contiguous", Behaviour::contiguous}});
}

void add_splitter(const Field& f, const std::string& type, std::vector<Splitter>& out) {
  check(out.empty() || !std::holds_alternative<ByteLevel>(out.back()), f.path,
        ": ByteLevel must be the last step");
  if (type == "Split") {
    f.only({"type", "pattern", "behavior", "invert"});
    Split s{regex(f.at("pattern")), behaviour(f.at("behavior")), f.flag("invert", false)};
    const bool either = s.behaviour == Behaviour::isolated || s.behaviour == Behaviour::removed;
    if (s.invert && !either) f.at("invert").refuse();
    out.emplace_back(std::move(s));
  } else if (type == "Digits") {
    f.only({"type", "individual_digits"});
    const bool each = f.flag("individual_digits", false);
    out.emplace_back(
        Split{Regex::pattern(f.path, each ? "\\p{N}" : "\\p{N}+"), Behaviour::isolated});
  } else if (type == "ByteLevel") {
    f.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    std::optional<Regex> pattern;
    if (f.flag("use_regex", true)) pattern.emplace(Regex::pattern(f.path, kGpt2Pattern));
    out.emplace_back(ByteLevel{f.at("add_prefix_space").boolean(), std::move(pattern)});
  } else if (type == "Metaspace") {
    out.emplace_back(metaspace(f));
  } else {
    f.at("type").refuse();
  }
}

void add_decoder(const Field& f, const std::string& type, std::vector<Decoder>& out) {
  if (type == "ByteLevel") {
    f.only({"type", "add_prefix_space", "trim_offsets", "use_regex"});
    out.emplace_back(DecodeBytes{});
  } else if (type == "Replace") {
    f.only({"type", "pattern", "content"});
    if (!f.at("pattern").has("String")) f.at("pattern").refuse();
    const std::string pattern = f.at("pattern").at("String").string();
    check(!pattern.empty(), f.path, ".pattern must not be empty");
    out.emplace_back(DecodeReplace{pattern, f.at("content").string()});
  } else if (type == "ByteFallback") {
    f.only({"type"});
    out.emplace_back(DecodeFallback{});
  } else if (type == "Fuse") {
    f.only({"type"});
    out.emplace_back(DecodeFuse{});
  } else if (type == "Strip") {
    f.only({"type", "content", "start", "stop"});
    check(!f.at("content").string().empty(), f.path, ".content must not be empty");
    out.emplace_back(DecodeStrip{f.at("content").string(), f.at("start").number(1 << 30),
                                 f.at("stop").number(1 << 30)});
  } else if (type == "Metaspace") {
    const Metaspace m = metaspace(f);
    out.emplace_back(DecodeMetaspace{m.replacement, m.prepend != Scheme::never});
  } else {
    f.at("type").refuse();
  }
}

void add_processor(const Field& f, const std::string& type, Model& out) {
  if (type == "ByteLevel") return;  // affects offsets only
  check(out.before.empty() && out.after.empty(), f.path, ": only one template is supported");
  if (type == "BertProcessing" || type == "RobertaProcessing") {  // [name, number] of each token
    f.only({"type", "sep", "cls", "trim_offsets", "add_prefix_space"});
    const auto number = [&](const char* key) {
      const std::vector<Field> pair = f.at(key).list();
      check(pair.size() == 2, f.path, ".", key, " must be [token, number]");
      return Token(pair[1].number(out.names.size()));
    };
    out.before = {number("cls")}, out.after = {number("sep")};
    return;
  }
  if (type != "TemplateProcessing") f.at("type").refuse();
  f.only({"type", "single", "pair", "special_tokens"});
  bool seen = false;
  for (const Field& part : f.at("single").list()) {
    part.only({"Sequence", "SpecialToken"});
    if (part.has("Sequence")) {
      check(!seen && part.at("Sequence").at("id").string() == "A", part.path,
            ": the sequence A must occur exactly once");
      seen = true;
      continue;
    }
    const std::string name = part.at("SpecialToken").at("id").string();
    for (const Field& id : f.at("special_tokens").at(name).at("ids").list())
      (seen ? out.after : out.before).push_back(Token(id.number(out.names.size())));
  }
  check(seen, f.path, ".single must contain the sequence A");
}

// Registers a token and its number.
void name_token(const std::string& path, Model& out, const std::string& name, Token id) {
  check(!out.exists[id], path, ": tokens '", out.names[id], "' and '", name,
        "' have the same number ", id);
  check(out.by_name.add(name, id), path, ": duplicate token '", name, "'");
  out.exists[id] = true;
  out.names[id] = name;
}

void read_flags(const Field& f, Model& out) {
  f.only({"type", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
          "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (f.has("type") && f.at("type").string() != "BPE") f.at("type").refuse();
  if (f.has("dropout") && f.at("dropout").json != 0.0) f.at("dropout").refuse();
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (f.has(key) && !f.at(key).string().empty()) f.at(key).refuse();
  for (const char* key : {"vocab", "merges"})  // json_reader leaves null if it read a list
    check(f.at(key).json.is_null(), f.path, ".", key, " has the wrong type");
  Bpe& bpe = out.bpe;
  bpe.bytes = !out.splitters.empty() && std::holds_alternative<ByteLevel>(out.splitters.back());
  bpe.fuse_unknown = f.flag("fuse_unk", false);
  bpe.ignore_merges = f.flag("ignore_merges", false);
  bpe.fallback = f.flag("byte_fallback", false);
  if (bpe.bytes && bpe.fallback) f.at("byte_fallback").refuse();
}

// All numbers must be below `most`.
void read_bpe(const Field& f, TokenizerJson& file, size_t most, Model& out) {
  read_flags(f, out);
  Bpe& bpe = out.bpe;
  out.by_name.reserve(file.vocabulary.size());
  std::vector<std::pair<std::string, Token>> keys;
  keys.reserve(file.vocabulary.size());
  for (auto& [name, number] : file.vocabulary) {
    check(number < most, f.path, ".vocab: the number of '", name, "' must be below ", most,
          ", got ", int64_t(number));
    name_token("model.vocab", out, name, Token(number));
    std::string bytes;
    if (!bpe.bytes)
      keys.emplace_back(std::move(name), Token(number));
    else if (to_bytes(name, bytes))
      keys.emplace_back(std::move(bytes), Token(number));
  }
  for (auto& [a, b] : file.merges)
    for (std::string* part : {&a, &b}) {
      std::string bytes;
      if (!bpe.bytes) continue;
      check(to_bytes(*part, bytes), f.path, ".merges: '", *part, "' is not byte-level text");
      *part = std::move(bytes);
    }
  finish(bpe, keys, file.merges);
  for (unsigned b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", b);
    bpe.of_byte[b] = out.by_name.find(name).value_or(kNone);
  }
  if (!f.has("unk_token")) return;
  const auto unknown = out.by_name.find(f.at("unk_token").string());
  check(unknown.has_value(), f.path, ".unk_token is not in the vocabulary");
  bpe.unknown = *unknown;
}

void read_added(const Field& f, size_t vocabulary, Model& out) {
  std::vector<AddedFinder::Pattern> raw, normal;
  size_t next_id = vocabulary;
  for (const Field& t : f.list()) {
    t.only({"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{t.at("content").string(),     Token(t.at("id").number(out.names.size())),
                     t.flag("single_word", false), t.flag("lstrip", false),
                     t.flag("rstrip", false),      t.flag("normalized", true),
                     t.flag("special", false)};
    if (token.content.empty()) continue;
    // The tokenizers package numbers them so: as in the vocabulary, else the next number.
    const auto known = out.by_name.find(token.content);
    const size_t wanted = known ? *known : next_id++;
    check(token.id == wanted, t.path, ": the number of '", token.content, "' must be ", wanted,
          ", got ", token.id);
    if (!known) name_token(t.path, out, token.content, token.id);
    if (token.special) out.special[token.id] = true;
    std::string buffer;
    if (token.normalized)
      normal.push_back(
          {std::string(normalized(out.normalizers, token.content, false, buffer)), token});
    else
      raw.push_back({token.content, token});
  }
  out.in_raw = AddedFinder(std::move(raw));
  out.in_normalized = AddedFinder(std::move(normal));
}

Model read(TokenizerJson file) {
  const Field root{file.settings, "tokenizer"};
  root.only({"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
             "post_processor", "decoder", "model"});
  for (const char* key : {"truncation", "padding"})
    if (root.has(key)) root.at(key).refuse();
  Model out;
  if (root.has("normalizer"))
    add_steps(root.at("normalizer"), "normalizers", add_normalizer, out.normalizers);
  if (root.has("pre_tokenizer"))
    add_steps(root.at("pre_tokenizer"), "pretokenizers", add_splitter, out.splitters);
  if (root.has("decoder")) add_steps(root.at("decoder"), "decoders", add_decoder, out.decoders);
  // Numbers far above the count of tokens mean that the file is damaged.
  const Field model = root.at("model");
  const size_t added = root.has("added_tokens") ? root.at("added_tokens").list().size() : 0;
  const size_t count = file.vocabulary.size(), most = 2 * (count + added) + 1024;
  out.names.resize(most);
  out.exists.resize(most);
  out.special.resize(most);
  read_bpe(model, file, most, out);
  if (root.has("added_tokens")) read_added(root.at("added_tokens"), count, out);
  if (root.has("post_processor"))
    add_steps(root.at("post_processor"), "processors", add_processor, out);
  while (!out.exists.empty() && !out.exists.back()) out.exists.pop_back();
  out.names.resize(out.exists.size());
  out.special.resize(out.exists.size());
  return out;
}

}  // namespace

Model read_model(const std::filesystem::path& path) {
  const files::MappedFile file(path);
  try {
    return read(parse_tokenizer_json(file.text()));
  } catch (const Error& e) {
    fail("'", path.string(), "': ", e.what());
  }
}

}  // namespace horner::text
