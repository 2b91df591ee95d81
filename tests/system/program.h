// A program of ours as a process: its arguments, environment and input, what it printed and how it ended.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/paths.h"

namespace ditfleet::testing {

class Program {
 public:
  struct Options {
    std::vector<std::string> environment;  // NAME=value, on top of this process's, whose DITFLEET_… are left out
    std::string input;
    std::string stdout_path;  // in place of a file that out() reads
  };

  explicit Program(const std::string& name, const std::vector<std::string>& arguments)
      : Program(name, arguments, Options()) {}
  Program(const std::string& name, const std::vector<std::string>& arguments, const Options& options) {
    char folder[] = "/tmp/ditfleet-program-XXXXXX";
    if (::mkdtemp(folder) == nullptr) std::abort();
    dir_ = folder;
    std::ofstream(dir_ + "/in", std::ios::binary) << options.input;
    std::vector<std::string> words = {program_path(name)};
    words.insert(words.end(), arguments.begin(), arguments.end());
    std::vector<std::string> variables = options.environment;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (std::string_view(*variable).substr(0, 9) != "DITFLEET_") variables.emplace_back(*variable);
    }
    std::vector<char*> argv, envp;
    for (auto& word : words) argv.push_back(word.data());
    for (auto& variable : variables) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    const int in = ::open((dir_ + "/in").c_str(), O_RDONLY | O_CLOEXEC);
    const std::string out_path = options.stdout_path.empty() ? dir_ + "/out" : options.stdout_path;
    const int out = ::open(out_path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    const int err = ::open((dir_ + "/err").c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(in, 0);
      ::dup2(out, 1);
      ::dup2(err, 2);
      ::execve(argv[0], argv.data(), envp.data());
      ::_exit(127);
    }
    for (const int fd : {in, out, err}) ::close(fd);
  }
  ~Program() {
    if (!ended_) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    std::error_code ignored;
    std::filesystem::remove_all(dir_, ignored);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // Its exit status, 128 + the signal that ended it, or -1 if it still runs after `limit`.
  int wait(std::chrono::milliseconds limit = std::chrono::seconds(60)) {
    const auto until = std::chrono::steady_clock::now() + limit;
    int status = 0;
    while (!ended_) {
      if (::waitpid(pid_, &status, WNOHANG) == pid_) {
        ended_ = true;
        exit_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
      } else if (std::chrono::steady_clock::now() >= until) {
        return -1;
      } else {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    return exit_;
  }
  void send(int signal) const { ::kill(pid_, signal); }
  pid_t pid() const { return pid_; }
  std::string out() const { return text_of(dir_ + "/out"); }
  std::string err() const { return text_of(dir_ + "/err"); }

 private:
  static std::string text_of(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }

  std::string dir_;
  pid_t pid_ = -1;
  bool ended_ = false;
  int exit_ = -1;
};

}  // namespace ditfleet::testing
