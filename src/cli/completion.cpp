// The manual page and the completions of bash, zsh and fish.
#include <algorithm>

#include "cli/help.h"
#include "cli/options.h"
#include "core/check.h"

namespace horner::cli {

// The text with `before` in front of every character of `special`.
static std::string escaped(const std::string& text, const std::string& special,
                           const std::string& before) {
  std::string out;
  for (const char c : text) {
    if (special.find(c) != special.npos) out += before;
    out += c;
  }
  return out;
}

// In single quotes, for all three shells.
static std::string in_quotes(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? "'\\''" : std::string(1, c);
  return out + "'";
}

static std::string words_of(const std::vector<std::string>& words) {
  std::string out;
  for (const std::string& w : words) out += (out.empty() ? "" : " ") + w;
  return out;
}

static std::string first_line(const std::string& text) {
  return text.substr(0, text.find('\n'));
}

// Whether a shell should offer files ("f"), folders ("d") or neither (""). Models and studies may
// also be files.
static std::string paths_of(const OptionFacts& o) {
  const std::string& word = o.positional ? o.names[0] : o.word;
  if (word == "DIR") return "d";
  return word == "FILE" || word == "INPUT" || word == "MODEL" || word == "STUDY" ? "f" : "";
}

// Bash: two tables, of options and of what follows each, in `case`.
static std::string bash(const CLI::App& app) {
  std::string commands, options, values;
  const auto add = [&](const std::string& command, const CLI::App& c) {
    std::vector<std::string> names;
    std::string positional = "words='' paths=''";
    for (const OptionFacts& o : options_of(c)) {
      const std::string offered =
          "words=" + in_quotes(words_of(o.choices)) + " paths='" + paths_of(o) + "'";
      if (o.positional) positional = offered;
      if (o.positional) continue;
      names.insert(names.end(), o.names.begin(), o.names.end());
      if (o.word.empty()) continue;
      std::string patterns;
      for (const std::string& n : o.names)
        patterns += (patterns.empty() ? "" : "|") + in_quotes(command + " " + n);
      values +=
          "    " + patterns + ") takes=" + (o.several ? "many" : "one") + " " + offered + " ;;\n";
    }
    options += "    " + in_quotes(command) + ") options=" + in_quotes(words_of(names)) + " " +
               positional + " ;;\n";
  };
  std::string top;
  for (const auto& [name, c] : commands_of(app)) {
    add(name, *c);
    const size_t space = name.rfind(' ');
    commands += (commands.empty() ? "" : "|") +
                in_quotes((space == name.npos ? "" : name.substr(0, space)) + ":" +
                          name.substr(space + 1));  // npos + 1 is 0
    if (space == name.npos) top += (top.empty() ? "" : " ") + name;
  }
  std::string below;
  for (const auto& [name, c] : commands_of(app)) {
    std::string inside;
    for (const auto& [lower, unused] : commands_of(*c))
      inside += (inside.empty() ? "" : " ") + lower;
    if (!inside.empty())
      below += "    " + in_quotes(name) + ") words=" + in_quotes(inside) + " ;;\n";
  }
  return "# Completions of horner for bash, made by 'horner help --completion bash'.\n"
         "_horner() {\n"
         "  local current=${COMP_WORDS[COMP_CWORD]} command='' option='' takes='' after=0 i word\n"
         "  local options='--help --version' words=" +
         in_quotes(top) +
         " paths=''\n"
         "  for ((i = 1; i < COMP_CWORD; ++i)); do\n"
         "    word=${COMP_WORDS[i]}\n"
         "    case \"$word\" in\n"
         "      -*) option=$word after=0; continue ;;\n"
         "    esac\n"
         "    after=$((after + 1))\n"
         "    [[ -n $option ]] && continue\n"
         "    case \"$command:$word\" in\n"
         "      " +
         commands +
         ") command=${command:+$command }$word ;;\n"
         "    esac\n"
         "  done\n"
         "  case \"$command\" in\n" +
         options +
         "  esac\n"
         "  case \"$command\" in\n" +
         below +
         "  esac\n"
         "  local own_words=$words own_paths=$paths\n"
         "  case \"$command $option\" in\n" +
         values +
         "  esac\n"
         "  if [[ $takes == one && $after -gt 0 ]]; then\n"
         "    takes='' words=$own_words paths=$own_paths\n"
         "  fi\n"
         "  COMPREPLY=()\n"
         "  if [[ $current == -* ]]; then\n"
         "    COMPREPLY=($(compgen -W \"$options\" -- \"$current\"))\n"
         "    return\n"
         "  fi\n"
         "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n"
         "  if [[ -n $paths ]]; then\n"
         "    compopt -o filenames 2>/dev/null\n"
         "    local IFS=$'\\n'\n"
         "    COMPREPLY+=($(compgen -\"$paths\" -- \"$current\"))\n"
         "  fi\n"
         "}\n"
         "complete -F _horner horner\n";
}

// An argument of zsh's _arguments.
static std::string zsh_argument(const OptionFacts& o, const std::string& name) {
  const std::string about = escaped(first_line(o.about), "[]:\\", "\\");
  std::string action;
  if (!o.choices.empty()) action = "(" + words_of(o.choices) + ")";
  if (const std::string paths = paths_of(o); !paths.empty()) {
    const std::string files = paths == "d" ? "_files -/" : "_files";
    action = action.empty() ? files : "{compadd -- " + words_of(o.choices) + "; " + files + "}";
  }
  const std::string word = o.word.empty() ? o.names[0] : o.word;
  const std::string value = ":" + escaped(word, ":", "\\") + ":" + action;
  if (o.positional) return in_quotes((o.several ? "*" : "") + value);
  return in_quotes((o.several ? "*" : "") + name + "[" + about + "]" +
                   (o.word.empty() ? "" : value));
}

static std::string zsh_function(const CLI::App& c, const std::string& name) {
  std::string function = "_horner" + (name.empty() ? "" : "_" + name);
  std::replace(function.begin(), function.end(), ' ', '_');
  std::string out = function + "() {\n";
  std::string arguments, described, cases;
  for (const OptionFacts& o : options_of(c))
    for (const std::string& option : o.names) arguments += " \\\n    " + zsh_argument(o, option);
  for (const auto& [below, app] : commands_of(c)) {
    if (below.find(' ') != below.npos) continue;
    described += "\n    " + in_quotes(below + ":" + escaped(app->get_description(), ":", "\\"));
    cases += "      " + below + ") " + function + "_" + below + " ;;\n";
  }
  if (described.empty()) return out + "  _arguments" + arguments + "\n}\n";
  return out + "  local line state\n  local -a commands\n  commands=(" + described + "\n  )\n" +
         "  _arguments -C" + arguments +
         " \\\n    '1: :->command' \\\n    '*:: :->rest'\n"
         "  case $state in\n    command) _describe command commands ;;\n    rest)\n"
         "      case $line[1] in\n" +
         cases + "      esac ;;\n  esac\n}\n";
}

static std::string zsh(const CLI::App& app) {
  std::string out =
      "#compdef horner\n# Completions of horner for zsh, made by 'horner help --completion zsh'.\n";
  for (const auto& [name, c] : commands_of(app)) out += zsh_function(*c, name);
  return out + zsh_function(app, "") + "_horner \"$@\"\n";
}

static std::string fish(const CLI::App& app) {
  std::string out =
      "# Completions of horner for fish, made by 'horner help --completion fish'.\n"
      "function __horner_at  # whether the words of the command so far are these: data pack\n"
      "  set -l words (commandline -opc)\n  set -l command\n"
      "  for word in $words[2..-1]\n    switch \"$command:$word\"\n      case";
  for (const auto& [name, c] : commands_of(app)) {
    const size_t space = name.rfind(' ');
    out += " " + in_quotes((space == name.npos ? "" : name.substr(0, space)) + ":" +
                           name.substr(space + 1));
  }
  out +=
      "\n        set command (string trim \"$command $word\")\n      case '*'\n        break\n"
      "    end\n  end\n  test \"$command\" = \"$argv\"\nend\n"
      "complete -c horner -f\n";
  const auto line = [&](const std::string& command, const std::string& rest) {
    out += "complete -c horner -n " +
           in_quotes(command.empty() ? "__horner_at" : "__horner_at " + command) + rest + "\n";
  };
  const auto add = [&](const std::string& command, const CLI::App& c) {
    for (const auto& [below, lower] : commands_of(c))
      if (below.find(' ') == below.npos)
        line(command, " -a " + below + " -d " + in_quotes(lower->get_description()));
    for (const OptionFacts& o : options_of(c)) {
      std::string rest, offered = words_of(o.choices);
      const std::string paths = paths_of(o);
      if (paths == "d") offered += " (__fish_complete_directories)";
      for (const std::string& n : o.names)
        if (!o.positional)
          rest += n.starts_with("--") ? " -l " + n.substr(2) : " -s " + n.substr(1);
      if (!o.word.empty()) rest += paths == "f" ? " -r -F" : " -x";
      if (o.positional && paths == "f") rest += " -F";
      if (!offered.empty()) rest += " -a " + in_quotes(offered);
      if (!rest.empty()) line(command, rest + " -d " + in_quotes(first_line(o.about)));
    }
  };
  add("", app);
  for (const auto& [name, c] : commands_of(app)) add(name, *c);
  return out;
}

std::string completion(const CLI::App& app, const std::string& shell) {
  if (shell == "bash") return bash(app);
  if (shell == "zsh") return zsh(app);
  if (shell == "fish") return fish(app);
  fail("no completions for the shell '", shell, "'; expected 'bash', 'zsh' or 'fish'");
}

// A line of text in roff: a leading dot or quote is not a request.
static std::string roff(const std::string& text) {
  std::string out;
  for (const char c : text) out += c == '\\' ? "\\e" : c == '-' ? "\\-" : std::string(1, c);
  return out.starts_with(".") || out.starts_with("'") ? "\\&" + out : out;
}

static std::string manual_of(const CLI::App& app) {
  std::string out;
  for (const OptionFacts& o : options_of(app)) {
    std::string names;
    for (const std::string& n : o.names)
      names += std::string(names.empty() ? "" : ", ") + (o.positional ? "\\fI" : "\\fB") + roff(n) +
               "\\fR";
    out += ".TP\n" + names + (o.word.empty() ? "" : " \\fI" + roff(o.word) + "\\fR") + "\n";
    std::istringstream lines(o.about);
    std::string before;
    for (std::string l; std::getline(lines, l); before = ".br\n") out += before + roff(l) + "\n";
  }
  return out;
}

std::string manual(const CLI::App& app) {
  std::string out =
      ".\\\" made by 'horner help --man'\n"
      ".TH HORNER 1 \"\" \"horner " HORNER_VERSION
      "\" \"User Commands\"\n"
      ".SH NAME\nhorner \\- " +
      roff("an attention laboratory") +
      "\n.SH SYNOPSIS\n.B horner\n.I COMMAND\n[\\fIOPTIONS\\fR]\n"
      ".SH DESCRIPTION\n" +
      roff(app.get_description()) + ".\n.SH OPTIONS\n" + manual_of(app) + ".SH COMMANDS\n";
  for (const auto& [name, c] : commands_of(app)) {
    out += ".SS horner " + roff(name) + "\n" + roff(c->get_description()) + "\n" + manual_of(*c);
    const std::string end = c->get_footer();
    if (end.empty()) continue;
    out += ".PP\n.nf\n";
    std::istringstream lines(end);
    for (std::string l; std::getline(lines, l);) out += roff(l) + "\n";
    out += ".fi\n";
  }
  return out +
         ".SH ENVIRONMENT\n.TP\n.B NO_COLOR\nif set, no colours\n"
         ".TP\n.B OMP_NUM_THREADS\nthe number of CPU threads\n"
         ".TP\n.B GOMP_SPINCOUNT\nhow long threads spin before they sleep; 5000 unless it or "
         "OMP_WAIT_POLICY is set\n"
         ".SH \"EXIT STATUS\"\n.TP\n0\nsuccess\n.TP\n1\na check or a run failed\n"
         ".TP\n2\nan error, explained by one line on standard error\n"
         ".TP\n130\ninterrupted by Ctrl\\-C\n";
}

}  // namespace horner::cli
