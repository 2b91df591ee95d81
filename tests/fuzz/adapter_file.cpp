// libFuzzer: an adapter file with any header and data. The reader must refuse it, or return terms whose views are in
// the file and fit the base model. The input is the header's JSON, byte 0xFE and the data, which is extended to the
// largest offset in the header.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>

#include "pipeline/families/flux/adapter_names.h"
#include "pipeline/families/flux2/adapter_names.h"
#include "pipeline/families/wan/adapter_names.h"
#include "pipeline/families/z_image/adapter_names.h"
#include "pipeline/lora/file.h"
#include "shared/loras/content.h"

namespace {

using namespace ditfleet;

constexpr std::uint64_t kMaxData = 1 << 16;

// The largest number in the text, up to kMaxData.
std::uint64_t largest_number(std::string_view text) {
  std::uint64_t largest = 0, number = 0;
  for (const char c : text) {
    number =
        c >= '0' && c <= '9' ? std::min<std::uint64_t>(number * 10 + static_cast<std::uint64_t>(c - '0'), kMaxData) : 0;
    largest = std::max(largest, number);
  }
  return largest;
}

std::string file_of(std::string_view input) {
  const auto split = std::min(input.find('\xFE'), input.size());
  const std::string_view header = input.substr(0, split);
  std::string data(input.substr(std::min(split + 1, input.size())));
  data.resize(largest_number(header));
  const std::uint64_t length = header.size();
  std::string file(sizeof length, '\0');
  std::memcpy(file.data(), &length, sizeof length);
  return file.append(header).append(data);
}

// A base that leaves out differences of weights and biases, and one that applies them.
const pipeline::LoraNames (&bases())[4] {
  static const pipeline::LoraNames bases[] = {
      pipeline::LoraNames(pipeline::flux_lora_base({{"transformer_blocks.0.attn.to_q", 0, 0, 4, 4},
                                                    {"transformer_blocks.0.attn.to_k", 0, 4, 4, 4},
                                                    {"transformer_blocks.0.attn.to_v", 0, 8, 4, 4},
                                                    {"transformer_blocks.0.attn.to_out.0", 1, 0, 4, 4}},
                                                   {{"encoder.layers.0.mlp.fc1", 0, 0, 4, 8}},
                                                   {{"encoder.block.0.layer.0.SelfAttention.q", 0, 0, 4, 4}})),
      pipeline::LoraNames(pipeline::wan_lora_base({{"blocks.0.attn1.to_q", 0, 0, 4, 4},
                                                   {"condition_embedder.time_proj", 1, 0, 4, 24},
                                                   {"proj_out", 2, 0, 4, 8}})),
      pipeline::LoraNames(pipeline::flux2_lora_base({{"transformer_blocks.0.attn.to_q", 0, 0, 4, 4},
                                                     {"transformer_blocks.0.attn.to_k", 0, 4, 4, 4},
                                                     {"transformer_blocks.0.attn.to_v", 0, 8, 4, 4},
                                                     {"double_stream_modulation_img.linear", 1, 0, 24, 4},
                                                     {"x_embedder", 2, 0, 4, 8}})),
      pipeline::LoraNames(pipeline::z_image_lora_base({{"layers.0.attention.to_q", 0, 0, 4, 4},
                                                       {"layers.0.attention.to_k", 0, 4, 4, 4},
                                                       {"layers.0.attention.to_v", 0, 8, 4, 4},
                                                       {"all_x_embedder.2-1", 1, 0, 4, 8}}))};
  return bases;
}

void check(const std::string& path, const pipeline::LoraNames& names) {
  const auto adapter = pipeline::read_lora_file(path, names, 64);
  if (!adapter) {
    if (adapter.error().message.empty()) std::abort();
    return;
  }
  if (adapter->terms.empty() && adapter->biases.empty()) std::abort();
  std::string copy;  // the sanitizer checks the views
  const auto read = [&](const pipeline::TensorView& view) {
    copy.assign(reinterpret_cast<const char*>(view.bytes.data()), view.bytes.size());
  };
  for (const pipeline::LoraTerm& term : adapter->terms) {
    if (term.rank < 1 || term.rank > 64) std::abort();
    using Form = pipeline::LoraTerm::Form;
    const auto sides = [](const pipeline::TensorView& up, const pipeline::TensorView& down) {
      if (up.shape.size() != 2 || (!down.bytes.empty() && up.shape[1] != down.shape[0])) std::abort();
      return std::pair(up.shape[0], down.bytes.empty() ? up.shape[1] : down.shape[1]);
    };
    if (term.form == Form::kPair || term.form == Form::kDifference) {
      if (term.down.shape[1] != term.target->in ||
          (term.form == Form::kDifference ? term.rank : term.up.shape[0]) != term.target->out ||
          term.down.shape[0] != term.rank * term.blocks)
        std::abort();
    } else {
      const auto first = sides(term.up, term.down), second = sides(term.up2, term.down2);
      const auto whole = std::pair(term.target->out, term.target->in);
      if (term.form == Form::kHadamard ? first != whole || second != whole
                                       : std::pair(first.first * second.first, first.second * second.second) != whole)
        std::abort();
    }
    for (const pipeline::TensorView* view : {&term.down, &term.up, &term.down2, &term.up2}) read(*view);
  }
  for (const pipeline::LoraBias& bias : adapter->biases) {
    if (bias.values.shape.size() != 1 || bias.values.shape[0] != bias.target->out) std::abort();
    read(bias.values);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string file = file_of({reinterpret_cast<const char*>(data), size});
  // The registry's check, which gets the file in pieces, must not depend on where they end.
  loras::ContentCheck whole("fuzz"), pieces("fuzz");
  bool good = whole.feed(file).ok() && whole.finish().ok(), good_pieces = true;
  for (std::size_t at = 0; at < file.size() && good_pieces; at += 7) {
    good_pieces = pieces.feed(std::string_view(file).substr(at, 7)).ok();
  }
  if (good_pieces) good_pieces = pieces.finish().ok();
  if (good != good_pieces) std::abort();

  static const int fd = ::memfd_create("fuzz", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, file.data(), file.size(), 0) != static_cast<ssize_t>(file.size()))
    return 0;
  for (const pipeline::LoraNames& names : bases()) check(path, names);
  return 0;
}
