#include "shared/safetensors/header.h"

#include <algorithm>
#include <boost/json/basic_parser_impl.hpp>
#include <cstring>
#include <limits>
#include <optional>
#include <unordered_set>

#include "shared/core/bytes.h"
#include "shared/core/excerpt.h"
#include "shared/core/json.h"
#include "shared/core/little_endian.h"

namespace ditfleet::safetensors {
namespace {

constexpr std::size_t kLengthBytes = 8;
constexpr std::string_view kLfsPointer = "version ";  // …https://git-lfs.github.com/spec/v1

Error corrupt(std::string_view file_name, const std::string& what) {
  return data_corrupt("[safetensors] " + std::string(file_name) + ": " + what);
}

// A tensor's name as a message shows it: a hostile header must not fill the log.
std::string quoted(std::string_view name) {
  constexpr std::size_t kLongest = 200;
  return '"' + excerpt(name, kLongest) + (name.size() <= kLongest ? "\"" : "…\"");
}

// What boost::json's parser calls as it reads. Depth 1 is the whole header, depth 2 one tensor or the
// metadata, depth 3 a list of numbers. Reading events instead of a tree finds keys given twice, which a tree
// hides, and needs no second copy of a large header.
class HeaderHandler {
 public:
  static constexpr std::size_t max_object_size = std::size_t(-1);
  static constexpr std::size_t max_array_size = std::size_t(-1);
  static constexpr std::size_t max_key_size = std::size_t(-1);
  static constexpr std::size_t max_string_size = std::size_t(-1);
  using error_code = boost::system::error_code;

  SafetensorsHeader header;
  std::string failure;  // what is wrong, once parsing stopped for a reason of ours

  bool on_document_begin(error_code&) { return true; }
  bool on_document_end(error_code&) { return true; }

  bool on_object_begin(error_code& ec) {
    ++depth_;
    if (depth_ == 1) return true;
    if (depth_ > 2) return stop(ec, where() + " has an object instead of a value");
    if (!in_metadata_) entry_ = Entry{};
    return true;
  }
  bool on_object_end(std::size_t, error_code& ec) {
    --depth_;
    if (depth_ != 1) return true;
    if (in_metadata_) {
      in_metadata_ = false;
      return true;
    }
    return finish_tensor(ec);
  }
  bool on_array_begin(error_code& ec) {
    if (depth_ != 2 || in_metadata_ || numbers_ != nullptr) {
      return stop(ec, depth_ == 0 ? "the header is a JSON array; it must be an object"
                                  : where() + " has a list instead of another value");
    }
    if (key_ == "shape") {
      numbers_ = &entry_.shape.emplace();
    } else if (key_ == "data_offsets") {
      numbers_ = &entry_.offsets.emplace();
    } else {
      return stop(ec, where() + " has a list as " + quoted(key_) + "; only shape and data_offsets are lists");
    }
    return true;
  }
  bool on_array_end(std::size_t, error_code&) {
    numbers_ = nullptr;
    return true;
  }
  bool on_key_part(std::string_view part, std::size_t, error_code&) {
    text_.append(part);
    return true;
  }
  bool on_key(std::string_view part, std::size_t, error_code& ec) {
    text_.append(part);
    key_ = std::move(text_);
    text_.clear();
    if (depth_ == 1) {
      name_ = key_;
      in_metadata_ = name_ == "__metadata__";
      if (!names_.insert(name_).second) return stop(ec, quoted(name_) + " occurs twice");
      return true;
    }
    if (in_metadata_) {
      if (header.metadata.contains(key_)) return stop(ec, "__metadata__ has the key " + quoted(key_) + " twice");
      return true;
    }
    const bool known = key_ == "dtype" || key_ == "shape" || key_ == "data_offsets";
    if (!known) {
      return stop(ec, where() + " has the field " + quoted(key_) + "; only dtype, shape and data_offsets are allowed");
    }
    const bool twice = (key_ == "dtype" && entry_.dtype) || (key_ == "shape" && entry_.shape) ||
                       (key_ == "data_offsets" && entry_.offsets);
    if (twice) return stop(ec, where() + " has " + key_ + " twice");
    return true;
  }
  bool on_string_part(std::string_view part, std::size_t, error_code&) {
    text_.append(part);
    return true;
  }
  bool on_string(std::string_view part, std::size_t, error_code& ec) {
    text_.append(part);
    const std::string value = std::move(text_);
    text_.clear();
    if (depth_ == 2 && in_metadata_) {
      header.metadata.emplace(key_, value);
      return true;
    }
    if (depth_ != 2 || numbers_ != nullptr || key_ != "dtype") {
      return stop(ec, where() + " has the unexpected text " + quoted(value));
    }
    entry_.dtype = dtype_from_name(value);
    if (!entry_.dtype)
      return stop(ec, where() + " has the dtype " + quoted(value) + ", which safetensors does not define");
    return true;
  }
  bool on_number_part(std::string_view, error_code&) { return true; }
  bool on_int64(std::int64_t value, std::string_view, error_code& ec) {
    if (numbers_ == nullptr) return stop(ec, where() + " has an unexpected number");
    if (value < 0)
      return stop(ec, where() + " has " + std::to_string(value) + " in " + key_ + "; it cannot be negative");
    numbers_->push_back(value);
    return true;
  }
  bool on_uint64(std::uint64_t, std::string_view, error_code& ec) {
    return stop(ec, where() + " has a number beyond 63 bits");
  }
  bool on_double(double, std::string_view, error_code& ec) {
    return stop(ec, where() + " has a number that is not an integer or is too large");
  }
  bool on_bool(bool, error_code& ec) { return stop(ec, where() + " has an unexpected boolean"); }
  bool on_null(error_code& ec) { return stop(ec, where() + " has null instead of a value"); }
  bool on_comment_part(std::string_view, error_code&) { return true; }
  bool on_comment(std::string_view, error_code&) { return true; }

 private:
  struct Entry {
    std::optional<DType> dtype;
    std::optional<std::vector<std::int64_t>> shape, offsets;
  };

  std::string where() const {
    if (depth_ == 0) return "the header";
    return in_metadata_ ? std::string("__metadata__") : "tensor " + quoted(name_);
  }

  bool stop(error_code& ec, std::string what) {
    failure = std::move(what);
    ec = boost::json::error::syntax;  // any error: the parser needs one to stop
    return false;
  }

  bool finish_tensor(error_code& ec) {
    if (!entry_.dtype || !entry_.shape || !entry_.offsets) {
      return stop(ec, where() + " has no " + (!entry_.dtype ? "dtype" : !entry_.shape ? "shape" : "data_offsets"));
    }
    const std::vector<std::int64_t>& offsets = *entry_.offsets;
    if (offsets.size() != 2 || offsets[0] > offsets[1]) {
      return stop(
          ec, where() + " has data_offsets " + shape_text(offsets) + "; they must be [begin, end] with begin ≤ end");
    }
    const Result<std::uint64_t> size = tensor_bytes(*entry_.dtype, *entry_.shape);
    if (!size) return stop(ec, where() + ": " + size.error().message);
    const auto length = static_cast<std::uint64_t>(offsets[1] - offsets[0]);
    if (length != *size) {
      return stop(ec, where() + " is " + std::string(dtype_name(*entry_.dtype)) + " " + shape_text(*entry_.shape) +
                          ", which takes " + std::to_string(*size) + " bytes, but its range has " +
                          std::to_string(length));
    }
    header.tensors.push_back(TensorEntry{name_, *entry_.dtype, std::move(*entry_.shape),
                                         static_cast<std::uint64_t>(offsets[0]),
                                         static_cast<std::uint64_t>(offsets[1])});
    return true;
  }

  int depth_ = 0;
  bool in_metadata_ = false;
  std::string text_, key_, name_;
  Entry entry_;
  std::vector<std::int64_t>* numbers_ = nullptr;
  std::unordered_set<std::string> names_;
};

// Ranges, still relative to the data part, must cover it exactly.
std::optional<std::string> range_problem(const std::vector<TensorEntry>& tensors, std::uint64_t data_bytes) {
  std::vector<const TensorEntry*> order;
  order.reserve(tensors.size());
  for (const TensorEntry& tensor : tensors) order.push_back(&tensor);
  std::sort(order.begin(), order.end(), [](const TensorEntry* a, const TensorEntry* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::uint64_t at = 0;
  for (const TensorEntry* tensor : order) {
    if (tensor->begin != at) {
      return "tensor " + quoted(tensor->name) + " starts at byte " + std::to_string(tensor->begin) + " of the data, " +
             (tensor->begin < at ? "inside the previous tensor" : "leaving a gap") + "; it must start at " +
             std::to_string(at);
    }
    if (tensor->end > data_bytes) {
      return "tensor " + quoted(tensor->name) + " ends at byte " + std::to_string(tensor->end) +
             " of the data, but the file has only " + std::to_string(data_bytes) + " (is it truncated?)";
    }
    at = tensor->end;
  }
  if (at != data_bytes) {
    return "the tensors take " + std::to_string(at) + " bytes, but " + std::to_string(data_bytes) +
           " follow the header";
  }
  return std::nullopt;
}

}  // namespace

std::string shape_text(const std::vector<std::int64_t>& shape) {
  constexpr std::size_t kLongest = 16;
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size() && i < kLongest; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + (shape.size() > kLongest ? ", …]" : "]");
}

Result<std::uint64_t> tensor_bytes(DType dtype, const std::vector<std::int64_t>& shape) {
  constexpr std::uint64_t kMost = std::numeric_limits<std::int64_t>::max();
  std::uint64_t bits = static_cast<std::uint64_t>(dtype_bits(dtype));
  for (const std::int64_t extent : shape) {
    if (extent < 0) return invalid_argument("the shape " + shape_text(shape) + " has a negative extent");
  }
  // An extent of 0 makes the rest irrelevant, also where the product of the others would overflow.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return std::uint64_t{0};
  for (const std::int64_t extent : shape) {
    const auto size = static_cast<std::uint64_t>(extent);
    if (bits > kMost / size) return invalid_argument("the shape " + shape_text(shape) + " is larger than any file");
    bits *= size;
  }
  if (bits % 8 != 0)
    return invalid_argument("the shape " + shape_text(shape) + " of packed elements does not fill whole bytes");
  return bits / 8;
}

Result<std::uint64_t> safetensors_header_end(std::string_view begin, std::string_view file_name) {
  if (begin.size() < kLengthBytes) {
    return corrupt(file_name, "it has " + std::to_string(begin.size()) + " bytes, too few for a header");
  }
  if (begin.starts_with(kLfsPointer))
    return corrupt(file_name, "it is a Git LFS pointer, not the file; `git lfs pull` fetches that");
  const auto length = from_little_endian<std::uint64_t>(begin);
  if (length > kMaxSafetensorsHeaderBytes) {
    return corrupt(file_name, "it says its header has " + std::to_string(length) + " bytes; at most " +
                                  std::to_string(kMaxSafetensorsHeaderBytes) +
                                  " are allowed (is it a safetensors file?)");
  }
  return kLengthBytes + length;
}

Result<SafetensorsHeader> parse_safetensors_header(std::string_view file, std::string_view file_name) {
  return parse_safetensors_header(file, file.size(), file_name);
}

Result<SafetensorsHeader> parse_safetensors_header(std::string_view begin, std::uint64_t file_bytes,
                                                   std::string_view file_name) {
  const Result<std::uint64_t> data_begin = safetensors_header_end(begin, file_name);
  if (!data_begin) return data_begin.error();
  const std::uint64_t length = *data_begin - kLengthBytes;
  if (*data_begin > file_bytes || *data_begin > begin.size()) {
    return corrupt(file_name, "it says its header has " + std::to_string(length) + " bytes, but only " +
                                  std::to_string(std::min<std::uint64_t>(file_bytes, begin.size()) - kLengthBytes) +
                                  " follow (is it truncated?)");
  }
  const std::string_view text = begin.substr(kLengthBytes, length);
  if (text.empty() || text.front() != '{') return corrupt(file_name, "its header does not start with '{'");
  if (!is_valid_utf8(text)) return corrupt(file_name, "its header is not valid UTF-8");

  boost::json::parse_options options;
  options.max_depth = 8;
  boost::json::basic_parser<HeaderHandler> parser(options);
  boost::system::error_code ec;
  const std::size_t read = parser.write_some(false, text.data(), text.size(), ec);
  HeaderHandler& handler = parser.handler();
  if (!handler.failure.empty()) return corrupt(file_name, handler.failure);
  if (ec) return corrupt(file_name, "its header is not JSON near byte " + std::to_string(read) + ": " + ec.message());
  if (text.find_first_not_of(" \t\r\n", read) != std::string_view::npos) {
    return corrupt(file_name, "its header has extra bytes after the JSON object");
  }

  SafetensorsHeader header = std::move(handler.header);
  if (auto problem = range_problem(header.tensors, file_bytes - *data_begin)) return corrupt(file_name, *problem);
  for (TensorEntry& tensor : header.tensors) {
    tensor.begin += *data_begin;
    tensor.end += *data_begin;
  }
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  return header;
}

}  // namespace ditfleet::safetensors
