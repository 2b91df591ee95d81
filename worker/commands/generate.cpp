#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <iostream>
#include <memory>

#include "pipeline/engine.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/job/flags.h"
#include "shared/media/writer.h"
#include "worker/commands/command_line.h"
#include "worker/commands/engine_options.h"
#include "worker/families.h"
#include "worker/models/request.h"

namespace ditfleet::worker {
namespace {

// Missing fields get the model's defaults.
struct GenerateFlags {
  ModelFlags model;
  std::string out, dump, frames_dir;
  job::FieldFlags fields;
  std::vector<std::string> loras;  // FILE[:SCALE[:EXPERT]]
};

// Reports an unusable path before the image is computed.
Result<void> check_folder_of(const char* flag, const std::string& path) {
  const auto folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder)) {
    return invalid_argument(std::string(flag) + " is '" + path + "' but the folder '" + folder.string() +
                            "' does not exist");
  }
  if (std::filesystem::is_directory(path)) {
    return invalid_argument(std::string(flag) + " is '" + path + "' but must be a file, not a folder");
  }
  return {};
}

// Parses FILE, FILE:SCALE or FILE:SCALE:EXPERT, such as "style.safetensors:0.7:high". The text after the last colons is
// scale and expert if it can be and the file before it exists. Errors: kInvalidArgument (invalid scale, empty file
// name), kNotFound (no such file). The message contains the flag.
Result<pipeline::LoraRequest> lora_of(const std::string& text) {
  const auto exists = [](const std::string& path) {
    std::error_code unknown;
    return std::filesystem::exists(path, unknown);
  };
  const auto use = job::parse_lora_flag(text);
  constexpr const char* kForms = "FILE, FILE:SCALE or FILE:SCALE:EXPERT";
  if (use && use->name.empty()) return invalid_argument("--lora is '" + text + "' but must be " + kForms);
  if (use && exists(use->name))
    return pipeline::LoraRequest{.path = use->name, .scale = use->scale, .expert = use->expert};
  if (exists(text)) return pipeline::LoraRequest{text, 1.0};  // the file name may contain a colon
  for (auto colon = text.rfind(':'); colon != text.npos && colon > 0; colon = text.rfind(':', colon - 1)) {
    if (!exists(text.substr(0, colon))) continue;
    return invalid_argument(
        "--lora is '" + text + "' but must be " + kForms +
        " with a finite number from -100 to 100 and high, low or both, such as style.safetensors:0.7");
  }
  return Error{
      Code::kNotFound,
      "--lora is '" + text + "' but the file '" + (use ? use->name : text) + "' does not exist; pass " + kForms,
      {}};
}

// Writes frame_0000.png … into `dir`, which is created.
Result<void> write_frames(const std::string& dir, const pipeline::Media& video) {
  std::error_code failed;
  std::filesystem::create_directories(dir, failed);
  if (failed) return unavailable("--frames-dir: cannot create the folder '" + dir + "': " + failed.message());
  const auto size = static_cast<std::ptrdiff_t>(video.rgb.size()) / video.frames;
  for (int i = 0; i < video.frames; ++i) {
    const auto at = video.rgb.begin() + i * size;
    auto bytes = media::encode({video.width, video.height, 1, 0, {at, at + size}}, job::OutputFormat::kPng, 100);
    if (!bytes) return bytes.error();
    std::string number = std::to_string(i);
    number.insert(0, 4 - std::min<std::size_t>(4, number.size()), '0');
    if (auto written = write_output_file(dir + "/frame_" + number + ".png", *bytes); !written) return written;
  }
  return {};
}

Result<void> run(const GenerateFlags& flags) {
  auto settings = settings_of(flags.model.memory.over(flags.model.sources));
  if (!settings) return settings.error();
  if (auto checked = check_folder_of("--out", flags.out); !checked) return checked;
  if (!flags.dump.empty()) {
    if (auto checked = check_folder_of("--dump", flags.dump); !checked) return checked;
  }
  auto spec = spec_of(flags.fields, flags.out, flags.model.dir);
  if (!spec) return spec.error();

  pipeline::GenerationRequest pictures;
  for (const auto& [field, files] : flags.fields) {
    if (field.row().type != job::FieldType::kImage) continue;
    for (const std::string& file : job::files_of(files)) {
      auto bytes = read_file(file);
      if (!bytes) return bytes.error();
      if (auto added = add_image(pictures, std::string(field.name()), *bytes); !added)
        return job::name_the_flag(added.error());
    }
  }
  std::vector<pipeline::LoraRequest> loras;
  for (const std::string& text : flags.loras) {
    auto lora = lora_of(text);
    if (!lora) return lora.error();
    loras.push_back(std::move(*lora));
  }
  // A preset names adapters that a service has registered.
  if (loras.size() < spec->loras.size()) {
    std::string needed;
    for (const job::LoraUse& use : spec->loras)
      needed += (needed.empty() ? "" : ", ") + use.name + " (" + std::string(job::expert_name(use.expert)) + ")";
    return invalid_argument("--preset is '" + spec->preset + "', which needs the adapters " + needed +
                            "; pass their files with --lora FILE:SCALE:EXPERT");
  }

  auto source = source_of(flags.model);
  if (!source) return source.error();
  const EngineFactory create = [&](const pipeline::RankOptions& ranks) -> Result<std::unique_ptr<pipeline::Engine>> {
    auto options = engine_options(*settings, flags.model);
    if (!options) return options.error();
    options->ranks = ranks;
    // One slot per adapter. Without adapters, no memory is reserved and no program is compiled for them.
    options->lora_slots = static_cast<int>(loras.size());
    return pipeline::Engine::create(*options, families());
  };
  auto ranks = start_ranks(*settings, create);
  if (!ranks) return ranks.error();
  auto engine = create_engine(*ranks, create);
  if (!engine) return engine.error();
  auto model = (*engine)->load_model(*source);
  if (!model) return model.error();

  const bool terminal = ::isatty(STDERR_FILENO) == 1;
  const int count = *spec->n;
  for (int i = 0; i < count; ++i) {
    auto request = request_of(*spec, i);
    request.loras = loras;
    request.images = pictures.images;
    request.mask = pictures.mask;
    auto prepared = (*model)->encode(request);
    if (!prepared) return job::name_the_flag(prepared.error());
    for (const auto& warning : (*prepared)->warnings()) std::cerr << "warning: " << warning << "\n";
    const auto on_step = [&](const pipeline::StepProgress& progress) {
      if (terminal) {
        std::cerr << "\rimage " << i + 1 << "/" << count << ", step " << progress.step << "/" << progress.total
                  << (progress.step == progress.total ? "\n" : "") << std::flush;
      }
      return true;
    };
    if (auto denoised = (*model)->denoise(**prepared, on_step); !denoised) return denoised;
    const auto writer = media::open_writer(*spec->output_format, *spec->output_compression);
    auto image = (*model)->decode(**prepared, [&](const pipeline::Media& so_far) { writer->add(so_far); });
    if (!image) return image.error();
    const std::string path = job::numbered_path(flags.out, i, count);
    auto bytes = writer->finish(*image, "");
    if (!bytes) return bytes.error();
    if (auto written = write_output_file(path, *bytes); !written) return written;
    if (!flags.frames_dir.empty()) {
      if (auto frames = write_frames(job::numbered_path(flags.frames_dir, i, count), *image); !frames) return frames;
    }
    if (!flags.dump.empty()) {
      if (auto dumped = (*prepared)->dump(job::numbered_path(flags.dump, i, count)); !dumped) return dumped;
    }
    std::cout << path << "  seed " << request.seed;
    if (const int skipped = (*prepared)->skipped_steps(); skipped > 0) std::cout << "  skipped steps " << skipped;
    std::cout << std::endl;
    if (!std::cout) return internal_error("cannot write to standard output");
  }
  return {};
}

}  // namespace

void add_generate(CLI::App& app, Invocation& invoked) {
  auto& command = *app.add_subcommand("generate", "Generate images for one prompt and write them to files");
  const auto kept = std::make_shared<GenerateFlags>();
  GenerateFlags& flags = *kept;
  add_model_flags(command, flags.model);
  command
      .add_option("--out", flags.out,
                  "Image file to write: .png, .jpg, .webp or .mp4; with -n above 1, NAME-1.png, NAME-2.png …")
      ->required()
      ->type_name("FILE");
  job::add_field_flags(command, flags.fields, false);
  command
      .add_option("--lora", flags.loras,
                  "Adapter: a safetensors file, or a folder of PEFT, for the transformer, CLIP and "
                  "T5; SCALE (default 1) may be negative; EXPERT is high, low or both (default); repeatable")
      ->type_name("FILE[:SCALE[:EXPERT]]")
      ->allow_extra_args(false);
  command
      .add_option("--frames-dir", flags.frames_dir,
                  "Also write every frame as frame_0000.png … into this folder; with -n above 1, DIR-1 …")
      ->type_name("DIR");
  command
      .add_option("--dump", flags.dump,
                  "Write the tensors of every stage to a safetensors file; with -n above 1, NAME-1 …")
      ->type_name("FILE");
  command.footer(
      "Missing fields get the model's defaults (ditfleet.json in its folder).\n"
      "Prints one line per image: its path and its seed.");
  command.callback([kept, &invoked] { invoked = [kept] { return report("generate", run(*kept)); }; });
}

}  // namespace ditfleet::worker
