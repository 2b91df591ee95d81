#include "shared/core/command_docs.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <vector>

#include "shared/core/output_file.h"
#include "shared/core/text.h"

namespace ditfleet {
namespace {

using Apps = std::vector<const CLI::App*>;

Apps commands_of(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

// Flags, and positional arguments if `positional`.
std::vector<const CLI::Option*> options_of(const CLI::App& app, bool positional) {
  return app.get_options(
      [&](const CLI::Option* o) { return o->get_positional() == positional && !o->get_group().empty(); });
}

// "-o", "--out".
std::vector<std::string> names_of(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return names;
}

bool takes_value(const CLI::Option& option) { return option.get_items_expected_max() > 0; }

// The words of a type such as "MODE:{auto,none}" or "auto|none".
std::vector<std::string> choices_of(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  std::string words;
  if (const auto open = type.find('{'), close = type.find('}'); open != type.npos && close > open)
    words = type.substr(open + 1, close - open - 1);
  else if (type.find('|') != type.npos && type.find_first_of(" [<") == type.npos)
    words = type;
  std::replace(words.begin(), words.end(), '|', ',');
  std::vector<std::string> choices;
  for (const std::string_view word : split(words, ','))
    if (!word.empty()) choices.emplace_back(word);
  return choices;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

// Calls `visit` for the program and all commands below, with the path of names: "", "/jobs", "/jobs/list".
void walk(const CLI::App& app, const std::string& path,
          const std::function<void(const CLI::App&, const std::string&)>& visit) {
  visit(app, path);
  for (const CLI::App* sub : commands_of(app)) walk(*sub, path + "/" + sub->get_name(), visit);
}

std::string single_quoted(const std::string& text, const char* escaped_quote) {
  std::string out = "'";
  for (const char c : text) {
    if (c == '\'')
      out += escaped_quote;
    else
      out += c;
  }
  return out + "'";
}

struct Shell {
  // The parts of a `case`: the arm for a pattern, and a print of words, each "word" or "word\tdescription".
  std::function<std::string(const std::vector<std::string>& patterns, const std::string& body)> arm;
  std::function<std::string(const std::vector<std::string>& lines)> print;
  std::string nothing;  // a body that does nothing
};

std::string quoted_all(const std::vector<std::string>& words, const char* escaped_quote, const char* separator) {
  std::string out;
  for (const std::string& word : words) out += (out.empty() ? "" : separator) + single_quoted(word, escaped_quote);
  return out;
}

// What may follow a path of commands, and the values of a flag after it; a file where nothing is printed.
struct Arms {
  std::string paths, values, words;
};
Arms arms_of(const CLI::App& program, const Shell& shell) {
  Arms arms;
  std::vector<std::string> paths;
  walk(program, "", [&](const CLI::App& app, const std::string& path) {
    if (!path.empty()) paths.push_back(path);
    std::vector<std::string> lines;
    for (const CLI::App* sub : commands_of(app))
      lines.push_back(sub->get_name() + "\t" + first_line(sub->get_description()));
    for (const CLI::Option* option : options_of(app, false)) {
      const auto names = names_of(*option);
      for (const std::string& name : names) lines.push_back(name + "\t" + first_line(option->get_description()));
      if (!takes_value(*option)) continue;
      std::vector<std::string> patterns;
      for (const std::string& name : names) patterns.push_back(path + " " + name);
      const auto choices = choices_of(*option);
      arms.values += shell.arm(patterns, choices.empty() ? shell.nothing : shell.print(choices));
    }
    if (!lines.empty()) arms.words += shell.arm({path}, shell.print(lines));
  });
  arms.paths = shell.arm(paths, "@");
  return arms;
}

std::string posix_script(const CLI::App& program, bool zsh) {
  const std::string name = program.get_name(), function = "_" + name;
  std::string words_function = function + "_words";
  std::replace(words_function.begin(), words_function.end(), '-', '_');
  const Shell shell{.arm =
                        [](const auto& patterns, const std::string& body) {
                          return "    " + quoted_all(patterns, "'\\''", "|") + ") " + body + " ;;\n";
                        },
                    .print =
                        [&](std::vector<std::string> lines) {
                          if (!zsh)
                            for (std::string& line : lines) line = line.substr(0, line.find('\t'));
                          return "printf '%s\\n' " + quoted_all(lines, "'\\''", " ");
                        },
                    .nothing = ":"};
  Arms arms = arms_of(program, shell);
  arms.paths.replace(arms.paths.find('@'), 1, "at=\"$at/$word\"");
  std::string script = zsh ? "#compdef " + name + "\n" : "";
  script += "# Completion of " + name + ", made by `" + name + " completion " + (zsh ? "zsh" : "bash") + "`.\n\n" +
            "# Prints the candidates after these words.\n" + words_function +
            "() {\n"
            "  local at= before= word\n"
            "  for word; do\n"
            "    case \"$at/$word\" in\n" +
            arms.paths +
            "    esac\n"
            "    before=$word\n"
            "  done\n"
            "  case \"$at $before\" in\n" +
            arms.values + "  *) case \"$at\" in\n" + arms.words +
            "  esac ;;\n"
            "  esac\n"
            "}\n\n";
  if (zsh)
    return script + function +
           "() {\n"
           "  local line\n"
           "  local -a found\n"
           "  for line in ${(f)\"$(" +
           words_function +
           " ${words[2,CURRENT-1]})\"}; do found+=(\"${${line%%$'\\t'*}//:/\\\\:}:${line#*$'\\t'}\"); done\n"
           "  if (( $#found )); then _describe '" +
           name +
           "' found; else _files; fi\n"
           "}\n"
           "(( $+functions[compdef] )) && compdef " +
           function + " " + name + "\n";
  std::string bash = function;
  std::replace(bash.begin(), bash.end(), '-', '_');
  return script + bash +
         "() {\n"
         "  local IFS=$'\\n'\n"
         "  COMPREPLY=($(compgen -W \"$(" +
         words_function +
         " \"${COMP_WORDS[@]:1:COMP_CWORD-1}\")\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
         "}\n"
         "complete -o bashdefault -o default -F " +
         bash + " " + name + "\n";
}

std::string fish_script(const CLI::App& program) {
  const std::string name = program.get_name();
  std::string function = "__" + name + "_words";
  std::replace(function.begin(), function.end(), '-', '_');
  const Shell shell{.arm =
                        [](const auto& patterns, const std::string& body) {
                          return "    case " + quoted_all(patterns, "\\'", " ") + "\n      " + body + "\n";
                        },
                    .print = [](const auto& lines) { return "printf '%s\\n' " + quoted_all(lines, "\\'", " "); },
                    .nothing = "__fish_complete_path \"$current\""};
  Arms arms = arms_of(program, shell);
  arms.paths.replace(arms.paths.find('@'), 1, "set at $at/$word");
  return "# Completion of " + name + ", made by `" + name +
         " completion fish`.\n\n# Prints the candidates after these words.\nfunction " + function +
         "\n  set at ''\n  set before ''\n  set current $argv[1]\n  for word in $argv[2..-1]\n    switch $at/$word\n" +
         arms.paths + "    end\n    set before $word\n  end\n  switch \"$at $before\"\n" + arms.values +
         "    case '*'\n  switch \"$at\"\n" + arms.words + "  end\n  end\nend\n\ncomplete -c " + name + " -f -a '(" +
         function + " \"$(commandline -ct)\" (commandline -opc)[2..-1])'\n";
}

// Text for roff: backslashes and hyphens are themselves, and no line begins with a control character.
std::string roff(const std::string& text) {
  std::string out;
  bool begins = true;
  for (const char c : text) {
    if (begins && (c == '.' || c == '\'')) out += "\\&";
    if (c == '\\')
      out += "\\e";
    else if (c == '-')
      out += "\\-";
    else
      out += c;
    begins = c == '\n';
  }
  return out;
}

std::string bold(const std::string& text) { return "\\fB" + roff(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + roff(text) + "\\fR"; }

std::string synopsis_of(const CLI::App& app, const std::string& words) {
  std::string line = bold(words);
  if (!options_of(app, false).empty()) line += " [" + italic("OPTION") + " ...]";
  for (const CLI::Option* option : options_of(app, true)) {
    std::string name = italic(option->get_name(true));
    if (option->get_items_expected_max() > 1) name += " ...";
    line += option->get_required() ? " " + name : " [" + name + "]";
  }
  if (!commands_of(app).empty()) line += " " + italic("COMMAND");
  return ".br\n" + line + "\n";
}

std::string options_text(const CLI::App& app) {
  std::string out;
  for (const bool positional : {true, false}) {
    for (const CLI::Option* option : options_of(app, positional)) {
      std::string names;
      if (positional) names = italic(option->get_name(true));
      for (const std::string& name : names_of(*option)) names += (names.empty() ? "" : ", ") + bold(name);
      if (!positional && takes_value(*option)) names += " " + italic(option->get_type_name());
      const std::string about = option->get_description();
      out += ".TP\n" + names + "\n" + roff(about) + (about.empty() || about.ends_with('.') ? "" : ".");
      if (!option->get_envname().empty()) out += " Environment: " + bold(option->get_envname()) + ".";
      out += "\n";
    }
  }
  return out;
}

}  // namespace

std::string completion_script(const CLI::App& program, std::string_view shell) {
  if (shell == "fish") return fish_script(program);
  return shell == "bash" || shell == "zsh" ? posix_script(program, shell == "zsh") : "";
}

std::map<std::string, std::string> manual_pages(const CLI::App& program, const std::string& version) {
  std::map<std::string, std::string> pages;
  const std::string name = program.get_name();
  const auto begin = [&](const std::string& page, const std::string& about) {
    std::string title = page;
    std::transform(title.begin(), title.end(), title.begin(), [](unsigned char c) { return std::toupper(c); });
    return ".TH \"" + roff(title) + "\" 1 \"\" \"" + roff(version) + "\"\n.SH NAME\n" + roff(page) + " \\- " +
           roff(first_line(about)) + "\n.SH SYNOPSIS\n";
  };
  std::string all;
  for (const CLI::App* command : commands_of(program)) {
    const std::string page = name + "-" + command->get_name();
    all += ".TP\n" + bold(page + "(1)") + "\n" + roff(first_line(command->get_description())) + "\n";
    std::string text = begin(page, command->get_description());
    walk(*command, name + " " + command->get_name(), [&](const CLI::App& app, const std::string& path) {
      std::string words = path;
      std::replace(words.begin(), words.end(), '/', ' ');
      if (commands_of(app).empty()) text += synopsis_of(app, words);
    });
    walk(*command, name + " " + command->get_name(), [&](const CLI::App& app, const std::string& path) {
      std::string words = path;
      std::replace(words.begin(), words.end(), '/', ' ');
      if (&app == command)
        text += ".SH DESCRIPTION\n" + roff(app.get_description()) + "\n";
      else
        text += ".SH \"" + roff(words) + "\"\n" + roff(app.get_description()) + "\n";
      text += options_text(app);
      if (!app.get_footer().empty()) text += ".PP\n.nf\n" + roff(app.get_footer()) + "\n.fi\n";
    });
    pages[page + ".1"] = text + ".SH SEE ALSO\n" + bold(name + "(1)") + "\n";
  }
  std::string main = begin(name, program.get_description()) + synopsis_of(program, name);
  main += ".SH DESCRIPTION\n" + roff(program.get_description()) + "\n" + options_text(program);
  if (!program.get_footer().empty()) main += ".PP\n" + roff(program.get_footer()) + "\n";
  pages[name + ".1"] = main + ".SH COMMANDS\n" + all;
  return pages;
}

void add_document_commands(CLI::App& app, std::function<int()>& run, const std::string& version) {
  auto shell = std::make_shared<std::string>(), folder = std::make_shared<std::string>();
  auto* completion = app.add_subcommand("completion", "Print a completion script for a shell");
  const std::string name = app.get_name();
  completion->footer("In bash: eval \"$(" + name + " completion bash)\"; in fish: " + name +
                     " completion fish | source\nIn zsh, after compinit: source <(" + name + " completion zsh)");
  completion->add_option("SHELL", *shell, "bash, zsh or fish")
      ->required()
      ->check(CLI::IsMember({"bash", "zsh", "fish"}))
      ->type_name("bash|zsh|fish");
  completion->callback([&app, &run, shell] {
    run = [&app, shell] {
      std::fputs(completion_script(app, *shell).c_str(), stdout);
      return 0;
    };
  });
  auto* manual = app.add_subcommand("man", "Write the manual pages into a folder, which is created");
  manual->add_option("FOLDER", *folder, "Such as ~/.local/share/man/man1")->required()->type_name("DIR");
  manual->callback([&app, &run, folder, version] {
    run = [&app, folder, version] {
      std::error_code failed;
      std::filesystem::create_directories(*folder, failed);
      for (const auto& [file, text] : manual_pages(app, version)) {
        const auto written = write_output_file((std::filesystem::path(*folder) / file).string(), text);
        if (written) continue;
        std::fprintf(stderr, "%s man: %s\n", app.get_name().c_str(), written.error().message.c_str());
        return 1;
      }
      return 0;
    };
  });
}

}  // namespace ditfleet
