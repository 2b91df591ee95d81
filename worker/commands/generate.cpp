#include "worker/commands/generate.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <map>

#include "pipeline/engine.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/job/lora_flag.h"
#include "shared/job/validate.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"
#include "worker/units/request.h"

namespace ditfleet::worker {
namespace {

constexpr const char* kCommand = "generate";

Result<std::int64_t> parse_seed(const std::string& text) {
  std::int64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, seed);
  if (error == std::errc() && at == end && seed >= 0) return seed;
  return invalid_argument("--seed is '" + text + "'; it takes a whole number from 0 to 9223372036854775807");
}

// What JSON, the form that the checks below read, could not carry.
Result<void> check_values(const GenerateFlags& flags) {
  for (const auto& [flag, text] :
       {std::pair<const char*, std::string>{"--prompt", flags.prompt}, {"--negative", flags.negative.value_or("")}}) {
    if (!is_valid_utf8(text)) return invalid_argument(std::string(flag) + " is not valid UTF-8");
  }
  for (const auto& [flag, number] : {std::pair<const char*, double>{"--guidance", flags.guidance.value_or(0)},
                                     {"--true-cfg", flags.true_cfg.value_or(0)}}) {
    if (!std::isfinite(number)) return invalid_argument(std::string(flag) + " must be a finite number");
  }
  return {};
}

// Says which flag set the field that an error is about.
Error name_the_flag(Error error) {
  static const std::map<std::string, std::string> kFlags = {{"width", "--size"},
                                                            {"height", "--size"},
                                                            {"size", "--size"},
                                                            {"num_inference_steps", "--steps"},
                                                            {"guidance_scale", "--guidance"},
                                                            {"true_cfg_scale", "--true-cfg"},
                                                            {"negative_prompt", "--negative"},
                                                            {"max_sequence_length", "--max-sequence-length"},
                                                            {"seed", "--seed"},
                                                            {"n", "-n"},
                                                            {"prompt", "--prompt"},
                                                            {"loras", "--lora"}};
  if (const auto flag = kFlags.find(error.param); flag != kFlags.end())
    error.message = flag->second + ": " + error.message;
  return error;
}

Result<job::OutputFormat> format_of(const std::string& path) {
  std::string extension = std::filesystem::path(path).extension();
  for (char& c : extension) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (extension == ".jpg" || extension == ".jpeg") return job::OutputFormat::kJpeg;
  if (extension == ".webp") return job::OutputFormat::kWebp;
  // A device or a pipe has no extension, nor has a name that somebody gave without one.
  if (extension.empty() || extension == ".png") return job::OutputFormat::kPng;
  return invalid_argument("--out is '" + path + "'; pictures are written as .png, .jpg or .webp");
}

// A picture that cannot be written should be known before it is computed.
Result<void> check_folder_of(const char* flag, const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    return invalid_argument(std::string(flag) + " is '" + path + "', but there is no folder '" + folder.string() + "'");
  }
  if (std::filesystem::is_directory(path)) {
    return invalid_argument(std::string(flag) + " is '" + path + "', which is a folder; it takes a file's name");
  }
  return {};
}

Result<void> run(const GenerateFlags& flags) {
  auto settings = settings_of(flags.sources);
  if (!settings) return settings.error();
  const auto format = format_of(flags.out);
  if (!format) return format.error();
  if (auto checked = check_folder_of("--out", flags.out); !checked) return checked;
  if (!flags.dump.empty()) {
    if (auto checked = check_folder_of("--dump", flags.dump); !checked) return checked;
  }
  auto entry = job::read_model_entry("model", flags.model_dir);
  if (!entry) return entry.error();
  auto spec = spec_of(flags, *entry);
  if (!spec) return spec.error();

  std::vector<pipeline::LoraRequest> loras;
  for (const std::string& text : flags.loras) {
    auto lora = lora_of(text);
    if (!lora) return lora.error();
    loras.push_back(std::move(*lora));
  }

  auto options = engine_options(*settings);
  if (!options) return options.error();
  if (!flags.device.empty()) options->device = flags.device;
  if (!flags.dtype.empty()) options->dtype = flags.dtype;
  // Each in a slot; without any, no room is kept for them and nothing is compiled for them.
  options->lora_slots = static_cast<int>(loras.size());
  auto engine = pipeline::Engine::create(*options, families());
  if (!engine) return engine.error();
  auto model = (*engine)->load_model("model", flags.model_dir);
  if (!model) return model.error();

  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const int count = *spec->n;
  for (int i = 0; i < count; ++i) {
    auto request = request_of(*spec, i);
    request.loras = loras;
    auto prepared = (*model)->encode(request);
    if (!prepared) return name_the_flag(prepared.error());
    for (const auto& warning : (*prepared)->warnings()) std::cerr << "warning: " << warning << "\n";
    const auto on_step = [&](const pipeline::StepProgress& progress) {
      if (terminal) {
        std::cerr << "\rimage " << i + 1 << "/" << count << ", step " << progress.step << "/" << progress.total
                  << (progress.step == progress.total ? "\n" : "") << std::flush;
      }
      return true;
    };
    if (auto denoised = (*model)->denoise(**prepared, on_step); !denoised) return denoised;
    auto image = (*model)->decode(**prepared);
    if (!image) return image.error();
    const std::string path = numbered_path(flags.out, i, count);
    auto bytes = pipeline::encode_media(*image, *format, quality_of(*spec));
    if (!bytes) return bytes.error();
    if (auto written = write_output_file(path, *bytes); !written) return written;
    if (!flags.dump.empty()) {
      if (auto dumped = (*prepared)->dump(numbered_path(flags.dump, i, count)); !dumped) return dumped;
    }
    std::cout << path << "  seed " << request.seed << std::endl;
    if (!std::cout) return internal_error("cannot write to standard output");
  }
  return {};
}

}  // namespace

void add_generate_flags(CLI::App& command, GenerateFlags& flags) {
  command.add_option("--model", flags.model_dir, "Model folder in diffusers' layout")->required()->type_name("DIR");
  command.add_option("--prompt", flags.prompt, "What to draw")->required()->type_name("TEXT");
  command
      .add_option(
          "--out", flags.out,
          "Where the picture goes; with -n above 1 NAME-1.png, NAME-2.png …; .jpg and .webp choose those formats")
      ->required()
      ->type_name("PNG");
  // Not bound to the optional itself: CLI11 reads an empty argument as an empty optional.
  command
      .add_option_function<std::string>(
          "--negative", [&flags](const std::string& text) { flags.negative = text; },
          "Negative prompt; \"\" counts as one (used when --true-cfg is above 1)")
      ->type_name("TEXT");
  command.add_option("--true-cfg", flags.true_cfg, "True classifier-free guidance scale")->type_name("SCALE");
  command  // As text: CLI11 reads a number that is too large as the largest.
      .add_option_function<std::string>(
          "--seed", [&flags](const std::string& text) { flags.seed = text; },
          "Seed of the first picture, the i-th after it has seed + i; default: random")
      ->type_name("N");
  command.add_option("--steps", flags.steps, "Denoising steps")->type_name("N");
  command.add_option("--guidance", flags.guidance, "Embedded guidance of guidance-distilled models")
      ->type_name("SCALE");
  command
      .add_option_function<std::string>(
          "--size", [&flags](const std::string& text) { flags.size = text; }, "Size in pixels")
      ->type_name("WxH");
  command.add_option("--max-sequence-length", flags.max_sequence_length, "T5 tokens, padded to exactly this")
      ->type_name("N");
  command
      .add_option("--lora", flags.loras,
                  "Adapter: a safetensors file of PEFT/diffusers, kohya, BFL or XLabs, for the transformer, CLIP and "
                  "T5; SCALE (1) may be negative; may be repeated")
      ->type_name("FILE[:SCALE]")
      ->allow_extra_args(false);
  command.add_option("--dtype", flags.dtype, "auto (bf16 on a GPU, fp32 on a CPU), fp32 or bf16")->type_name("DTYPE");
  command.add_option("--device", flags.device, "auto, cpu, cuda or cuda:N")->type_name("DEVICE");
  command.add_option("-n", flags.count, "How many pictures")->type_name("N");
  command
      .add_option("--dump", flags.dump,
                  "Write a safetensors file with every stage's tensors (with -n above 1 NAME-1 …)")
      ->type_name("FILE");
  add_configuration_flags(command, flags.sources);
  command.footer(
      "Fields that are not given take the model's defaults (ditfleet.json in its folder).\n"
      "Prints a line for each picture: its path and its seed.");
}

Result<job::JobSpec> spec_of(const GenerateFlags& flags, const job::ModelEntry& model) {
  if (auto checked = check_values(flags); !checked) return checked.error();
  job::JobSpec spec;
  spec.model = model.name;
  spec.prompt = flags.prompt;
  if (flags.negative) spec.fields.set("negative_prompt", *flags.negative);
  spec.n = flags.count.value_or(1);
  if (flags.size) {
    const auto size = job::parse_size(*flags.size);
    if (!size) {
      return invalid_argument("--size is '" + *flags.size + "'; it takes WIDTHxHEIGHT in pixels, such as 1024x768");
    }
    spec.fields.set("width", size->first);
    spec.fields.set("height", size->second);
  }
  if (flags.steps) spec.fields.set("num_inference_steps", *flags.steps);
  if (flags.guidance) spec.fields.set("guidance_scale", *flags.guidance);
  if (flags.true_cfg) spec.fields.set("true_cfg_scale", *flags.true_cfg);
  if (flags.max_sequence_length) spec.fields.set("max_sequence_length", *flags.max_sequence_length);
  if (flags.seed) {
    auto seed = parse_seed(*flags.seed);
    if (!seed) return seed.error();
    spec.seed = *seed;
  }
  // Through the same door as a job, so that the same limits hold.
  auto parsed = job::parse_spec(job::to_json(spec));
  if (!parsed) return name_the_flag(parsed.error());
  job::Catalogue catalogue;
  catalogue.models.emplace(model.name, model);
  catalogue.default_model = model.name;
  auto complete = job::complete_spec(std::move(*parsed), catalogue);
  if (!complete) return name_the_flag(complete.error());
  return complete;
}

Result<pipeline::LoraRequest> lora_of(const std::string& text) {
  const auto there = [](const std::string& path) {
    std::error_code unknown;
    return std::filesystem::exists(path, unknown);
  };
  const auto use = job::parse_lora_flag(text);
  if (use && use->name.empty())
    return invalid_argument("--lora is '" + text + "', which names no file; it takes FILE or FILE:SCALE");
  if (use && there(use->name)) return pipeline::LoraRequest{use->name, use->scale};
  if (there(text)) return pipeline::LoraRequest{text, 1.0};  // a file's name may hold a colon
  if (!use && there(text.substr(0, text.rfind(':')))) {
    return invalid_argument(
        "--lora is '" + text +
        "'; it takes FILE or FILE:SCALE with a finite number from -100 to 100, such as style.safetensors:0.7");
  }
  return Error{
      Code::kNotFound,
      "--lora is '" + text + "', but there is no file '" + (use ? use->name : text) + "'; it takes FILE or FILE:SCALE",
      {}};
}

std::string numbered_path(const std::string& path, int index, int count) {
  if (count <= 1) return path;
  const std::filesystem::path whole(path);
  return (whole.parent_path() / (whole.stem().string() + "-" + std::to_string(index + 1) + whole.extension().string()))
      .string();
}

int generate(const GenerateFlags& flags) {
  const auto done = run(flags);
  return done ? kExitOk : report(kCommand, done.error());
}

}  // namespace ditfleet::worker
