// horner help: the help of a command, the manual page, completions of shells.
#include "cli/help.h"

#include <algorithm>
#include <map>

#include "attn/attend.h"
#include "cli/options.h"
#include "cli/table.h"
#include "core/check.h"
#include "core/names.h"

namespace horner::cli {

static std::map<const CLI::Option*, Choices>& choice_table() {
  static std::map<const CLI::Option*, Choices> all;
  return all;
}
CLI::Option* choices(CLI::Option* o, Choices c) {
  choice_table()[o] = std::move(c);
  return o;
}
Choices choices_of(const CLI::Option* o) {
  const auto found = choice_table().find(o);
  return found == choice_table().end() ? Choices{} : found->second;
}

Choices variant_choices() {
  Choices out{.shown = false};
  for (const attn::Variant& v : attn::variants()) out.words.push_back(v.name);
  return out;
}
Choices execution_choices() {
  Choices out;
  for (const attn::Execution* e : attn::executions()) out.words.emplace_back(e->name);
  return out;
}

static std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : between) + w;
  return out;
}

std::vector<OptionFacts> options_of(const CLI::App& app) {
  std::vector<OptionFacts> out;
  for (const CLI::Option* o : app.get_options()) {
    const Choices c = choices_of(o);
    OptionFacts f{.about = o->get_description(),
                  .choices = c.words,
                  .positional = !o->nonpositional(),
                  .required = o->get_required(),
                  .several = o->get_items_expected_max() > 1};
    if (f.positional)
      f.names = {o->get_name(true)};
    else
      for (const auto& [dashes, names] :
           {std::pair("-", o->get_snames()), std::pair("--", o->get_lnames())})
        for (const std::string& name : names) f.names.push_back(dashes + name);
    if (!f.positional && o->get_items_expected_max() > 0) f.word = o->get_type_name();
    if (c.shown && !c.words.empty()) {
      const size_t value = f.about.rfind(" [");  // the default stays at the end
      const bool has = value != std::string::npos && f.about.ends_with("]");
      f.about.insert(has ? value : f.about.size(), " (one of " + joined(c.words, ", ") + ")");
    }
    if (f.required && !f.positional) f.about += " (required)";
    out.push_back(f);
  }
  return out;
}

std::vector<std::pair<std::string, const CLI::App*>> commands_of(const CLI::App& app) {
  std::vector<std::pair<std::string, const CLI::App*>> out;
  for (const CLI::App* c : app.get_subcommands([](const CLI::App*) { return true; })) {
    out.emplace_back(c->get_name(), c);
    for (const auto& [name, below] : commands_of(*c))
      out.emplace_back(c->get_name() + " " + name, below);
  }
  return out;
}

// "horner data pack"
static std::string full_name(const CLI::App& app) {
  return (app.get_parent() ? full_name(*app.get_parent()) + " " : "") + app.get_name();
}

static std::string usage(const CLI::App& app) {
  std::string out = full_name(app) + " [OPTIONS]";
  for (const OptionFacts& o : options_of(app)) {
    if (!o.positional && !o.required) continue;
    std::string word = o.names[0] + (o.word.empty() ? "" : " " + o.word);
    if (o.several) word += "...";
    out += o.required ? " " + word : " [" + word + "]";
  }
  if (!commands_of(app).empty()) out += app.get_parent() ? " WHAT" : " COMMAND";
  return out;
}

// A column of names, and beside it what they mean; a longer name has a line of its own.
static std::string definitions(const std::vector<std::pair<std::string, std::string>>& rows,
                               size_t columns) {
  constexpr size_t kWidest = 24;
  size_t left = 0;
  for (const auto& [name, about] : rows)
    if (width(name) <= kWidest) left = std::max(left, width(name));
  const size_t indent = left + 4;
  std::string out;
  for (const auto& [name, about] : rows) {
    std::string text;
    std::istringstream paragraphs(about);
    for (std::string p; std::getline(paragraphs, p);) text += wrapped(p, columns, indent);
    if (text.empty()) text = "\n";
    const std::string begin = "  " + name;
    out += width(name) <= left && text.size() > indent
               ? begin + std::string(indent - width(begin), ' ') + text.substr(indent)
               : begin + "\n" + text;
  }
  return out;
}

// A command line in lines of `columns`: it breaks before options.
static std::string broken(const std::string& command, size_t columns) {
  std::string out, line = "  ";
  std::istringstream words(command);
  std::vector<std::string> parts;  // an option and its values
  for (std::string w; words >> w;)
    if (parts.empty() || w.starts_with("--"))
      parts.push_back(w);
    else
      parts.back() += " " + w;
  for (const std::string& p : parts) {
    if (line.size() > 2 && width(line) + 1 + width(p) + 2 > columns)
      out += line + " \\\n", line = "    ";
    line += (line.find_first_not_of(' ') == line.npos ? "" : " ") + p;
  }
  return out + line + "\n";
}

// The examples of a command, from its footer; long ones are broken.
static std::string examples(const CLI::App& app, size_t columns) {
  std::istringstream lines(app.get_footer());
  std::string out;
  for (std::string line; std::getline(lines, line);)
    out += width(line) <= columns || !line.starts_with("  ") ? line + "\n" : broken(line, columns);
  return out;
}

std::string help_text(const CLI::App& app, size_t columns) {
  std::string out = wrapped(app.get_description(), columns, 0);
  out += "\n" + bold("Usage:") + wrapped(usage(app), columns - 7, 1);
  std::vector<std::pair<std::string, std::string>> arguments, options, commands;
  for (const OptionFacts& o : options_of(app)) {
    const std::string name =
        joined(o.names, ", ") + (o.word.empty() ? "" : " " + o.word) + (o.several ? "..." : "");
    (o.positional ? arguments : options).emplace_back(name, o.about);
  }
  for (const auto& [name, command] : commands_of(app))
    if (name.find(' ') == name.npos) commands.emplace_back(name, command->get_description());
  for (const auto& [title, rows] :
       {std::pair("Arguments", arguments), {"Options", options}, {"Commands", commands}})
    if (!rows.empty())
      out += "\n" + bold(title + std::string(":")) + "\n" + definitions(rows, columns);
  const std::string end = examples(app, columns);
  return out + (end.empty() ? "" : "\n" + end);
}

struct HelpFormatter : CLI::Formatter {
  std::string make_help(const CLI::App* app, std::string, CLI::AppFormatMode) const override {
    constexpr size_t kDefault = 80, kWidest = 100;
    const size_t terminal = terminal_width();
    return help_text(*app, terminal ? std::clamp<size_t>(terminal, 40, kWidest) : kDefault);
  }
};

void use_help_text(CLI::App& app) {
  app.formatter(std::make_shared<HelpFormatter>());
  for (CLI::App* c : app.get_subcommands([](CLI::App*) { return true; })) use_help_text(*c);
}

Action help(CLI::App& app) {
  struct Options {
    std::vector<std::string> command;
    std::string shell;
    bool manual = false;
  };
  const auto o = std::make_shared<Options>();
  Choices names;
  names.shown = false;
  for (const CLI::App* c : app.get_parent()->get_subcommands([](const CLI::App*) { return true; }))
    names.words.push_back(c->get_name());
  choices(option(app, "COMMAND", o->command, "", "the command to explain [all of them, in brief]"),
          names);
  choices(option(app, "--completion", o->shell, "SHELL", "print the completions for a shell"),
          {{"bash", "zsh", "fish"}});
  app.add_flag("--man", o->manual, "print the manual page, horner(1)");
  return [o, &app] {
    const CLI::App* of = app.get_parent();
    if (!o->shell.empty())
      std::cout << completion(*of, o->shell);
    else if (o->manual)
      std::cout << manual(*of);
    else {
      for (const std::string& word : o->command) {
        std::vector<std::string> known;
        const CLI::App* next = nullptr;
        for (const CLI::App* c : of->get_subcommands([](const CLI::App*) { return true; })) {
          known.push_back(c->get_name());
          if (c->get_name() == word) next = c;
        }
        horner::check(!known.empty(), "'", full_name(*of), "' has no commands below it, such as '",
                      word, "'");
        horner::check(next, "unknown command '", word, "'; did you mean ",
                      quoted(nearest(word, known)), "?");
        of = next;
      }
      std::cout << HelpFormatter().make_help(of, "", CLI::AppFormatMode::Normal);
    }
    return Outcome::fine;
  };
}

}  // namespace horner::cli
