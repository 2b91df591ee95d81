// Completion scripts and manual pages of a command line, made from its CLI11 tree. Pure; thread-safe.
#pragma once

#include <CLI/App.hpp>
#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace ditfleet {

// A script for "bash", "zsh" or "fish" that completes the program's commands, flags, choices and files. "" for another
// shell. Each has a function that prints the candidates for given words, a line each, in zsh and fish with what they
// do.
std::string completion_script(const CLI::App& program, std::string_view shell);

// Manual pages in roff's macros "man", by the names of their files: PROGRAM.1, and PROGRAM-COMMAND.1 for each command.
std::map<std::string, std::string> manual_pages(const CLI::App& program, const std::string& version);

// Adds the commands `completion SHELL`, which prints the script, and `man FOLDER`, which writes the pages. Each sets
// `run` to a function that returns the exit status. `app` must outlive it.
void add_document_commands(CLI::App& app, std::function<int()>& run, const std::string& version);

}  // namespace ditfleet
