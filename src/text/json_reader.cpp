// Parses tokenizer.json by events: half a million merges as JSON values would take a second.
#include "text/json_reader.h"

#include "core/check.h"
#include "files/json.h"

namespace horner::text {

namespace {

using Json = nlohmann::json;

struct Reader : nlohmann::json_sax<Json> {
  enum class In { settings, vocabulary, merges, merge };

  TokenizerJson out;
  In in = In::settings;
  std::vector<Json*> open;        // the objects and lists around the next value, outermost first
  std::vector<std::string> keys;  // the last key of each; "" in a list
  size_t parts = 0;               // of a merge

  // Stores the next value. Pointers stay valid: a list does not grow while its last item is open.
  Json& put(Json value) {
    if (open.empty()) return out.settings = std::move(value);
    Json& parent = *open.back();
    if (!parent.is_array()) return parent[keys.back()] = std::move(value);
    parent.push_back(std::move(value));
    return parent.back();
  }
  bool wrong() const {
    if (in == In::vocabulary) fail("model.vocab must map tokens to numbers");
    fail("model.merges[", out.merges.size(), "] must be a pair of tokens");
  }
  template <class T>
  bool scalar(T value) {
    if (in != In::settings) return wrong();
    put(Json(std::move(value)));
    return true;
  }

  bool null() override { return scalar(nullptr); }
  bool boolean(bool x) override { return scalar(x); }
  bool number_integer(number_integer_t x) override { return scalar(x); }
  bool number_float(number_float_t x, const string_t&) override { return scalar(x); }
  bool binary(binary_t&) override { return wrong(); }
  bool number_unsigned(number_unsigned_t x) override {
    if (in != In::vocabulary) return scalar(x);
    out.vocabulary.back().second = x;
    return true;
  }
  bool string(string_t& x) override {
    if (in == In::merges) return add_merge(x);
    if (in != In::merge) return scalar(x);
    if (++parts > 2) return wrong();
    (parts == 1 ? out.merges.back().first : out.merges.back().second) = std::move(x);
    return true;
  }
  bool add_merge(const string_t& x) {
    const size_t space = x.find(' ');
    if (space == std::string::npos || x.find(' ', space + 1) != std::string::npos) return wrong();
    out.merges.emplace_back(x.substr(0, space), x.substr(space + 1));
    return true;
  }
  bool key(string_t& x) override {
    if (in == In::vocabulary)
      out.vocabulary.emplace_back(std::move(x), ~uint64_t(0));
    else
      keys.back() = std::move(x);
    return true;
  }
  bool in_model(const char* key) const {
    return open.size() == 2 && keys[0] == "model" && keys[1] == key;
  }
  // Starts an object or a list. The one in the model under `key` is read to a vector instead.
  bool start(Json value, const char* key, In vector, bool empty) {
    if (in != In::settings) return wrong();
    if (in_model(key)) {
      check(empty, "duplicate model.", key);
      in = vector;
      put(nullptr);
      return true;
    }
    check(open.size() < 16, "JSON is nested too deeply");
    open.push_back(&put(std::move(value)));
    keys.emplace_back();
    return true;
  }
  bool end() {
    if (in == In::settings) open.pop_back(), keys.pop_back();
    in = in == In::merge ? In::merges : In::settings;
    return true;
  }
  bool start_object(std::size_t) override {
    return start(Json::object(), "vocab", In::vocabulary, out.vocabulary.empty());
  }
  bool end_object() override { return end(); }
  bool start_array(std::size_t) override {
    if (in == In::merges) {
      in = In::merge;
      parts = 0;
      out.merges.emplace_back();
      return true;
    }
    return start(Json::array(), "merges", In::merges, out.merges.empty());
  }
  bool end_array() override { return in == In::merge && parts != 2 ? wrong() : end(); }
  bool parse_error(std::size_t, const std::string&, const Json::exception& e) override {
    fail("not valid JSON: ", files::problem_of(e));
  }
};

}  // namespace

TokenizerJson parse_tokenizer_json(std::string_view text) {
  Reader reader;
  Json::sax_parse(text, &reader);
  check(reader.out.settings.is_object(), "expected a JSON object");
  return std::move(reader.out);
}

}  // namespace horner::text
