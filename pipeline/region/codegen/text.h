// Lines of generated source with their indentation.
#pragma once

#include <string>

namespace ditfleet::region {

class Text {
 public:
  Text& operator()(const std::string& line) {
    if (!line.empty() && line.front() == '}') --depth_;
    text_.append(line.empty() ? 0 : static_cast<std::size_t>(depth_) * 2, ' ').append(line).push_back('\n');
    if (!line.empty() && line.back() == '{') ++depth_;
    return *this;
  }
  std::string take() { return std::move(text_); }

 private:
  std::string text_;
  int depth_ = 0;
};

}  // namespace ditfleet::region
