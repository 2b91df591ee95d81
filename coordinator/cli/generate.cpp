#include "coordinator/cli/generate.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "coordinator/cli/http_client.h"
#include "coordinator/cli/job_watch.h"
#include "coordinator/cli/json_fields.h"
#include "coordinator/cli/terminal.h"
#include "shared/core/bytes.h"
#include "shared/core/output_file.h"
#include "shared/job/flags.h"

namespace ditfleet::cli {
namespace {

namespace fs = std::filesystem;

Error failure_of(const json::value& job) {
  std::string message = "job " + text(job, "id") + " " + text(job, "state");
  json::value error = field(job, "error");
  for (const json::value& unit : items(job, "unit_records")) {
    if (error.is_null()) error = field(unit, "error");
  }
  if (const std::string why = text(error, "message"); !why.empty()) message += ": " + why;
  return {text(error, "code") == "invalid_argument" ? Code::kInvalidArgument : Code::kUnavailable, message, {}};
}

// Downloads every picture. The files' names are reserved for whole pictures: nothing half-written appears.
Result<json::array> save_pictures(HttpClient& client, const json::value& job, const GenerateFlags& flags) {
  const std::string id = text(job, "id");
  const auto& units = items(job, "unit_records");
  json::array images;
  for (std::size_t i = 0; i < units.size(); ++i) {
    const json::value& result = field(units[i], "result");
    const auto index = static_cast<int>(integer(units[i], "unit", static_cast<std::int64_t>(i)));
    auto picture =
        client.request("GET", "/v1/jobs/" + id + "/results/" + std::to_string(index), {}, std::chrono::minutes(2));
    if (!picture) return picture.error();
    if (picture->status != 200) return error_of(*picture, "the image of unit " + std::to_string(index));
    if (const std::string expected = text(result, "sha256");
        !expected.empty() && sha256_hex(picture->body) != expected) {
      return Error{Code::kDataCorrupt,
                   "the image of unit " + std::to_string(index) +
                       " was damaged in transfer; download it again from the URL in: ditfleet jobs show " + id,
                   {}};
    }
    const auto format = job::format_from_media_type(picture->content_type);
    const std::string path =
        !flags.out.empty() ? flags.out : id + std::string(format ? job::row_of(*format).extension : "");
    const std::string file = job::numbered_path(path, index, static_cast<int>(units.size()));
    if (auto written = write_output_file(file, picture->body); !written) return written.error();
    images.push_back(json::object{{"path", file},
                                  {"seed", field(result, "seed")},
                                  {"width", field(result, "width")},
                                  {"height", field(result, "height")},
                                  {"bytes", picture->body.size()},
                                  {"media_type", picture->content_type}});
  }
  return images;
}

// Uploads the files of images, and puts their ids in their place.
Result<void> upload_images(HttpClient& client, job::FieldFlags& fields) {
  for (auto& [field, value] : fields) {
    if (field.row().type != job::FieldType::kImage) continue;
    std::string ids;
    for (const std::string& file : job::files_of(value)) {
      const auto stored = client.send_file("POST", "/v1/uploads", file);
      if (!stored) return Error{stored.error().code, std::string(field.row().flag) + ": " + stored.error().message, {}};
      ids += (ids.empty() ? "" : "\n") + text(*stored, "id");
    }
    value = std::move(ids);
  }
  return {};
}

Result<void> generate(GenerateFlags flags) {
  if (flags.no_wait && !flags.out.empty())
    return invalid_argument("-o needs the result, which --no-wait does not wait for; give one of them");
  if (std::any_of(flags.idempotency_key.begin(), flags.idempotency_key.end(),
                  [](char c) { return c < 0x21 || c > 0x7e; }))
    return invalid_argument("--idempotency-key must be 1 to 255 visible ASCII characters, such as a UUID");
  if (!flags.fields.contains(job::Field("prompt")))
    return invalid_argument("the prompt is required: ditfleet generate \"a red circle\" -o circle.png");
  if (auto good = job_body(flags); !good) return good.error();
  if (!flags.out.empty()) {
    const fs::path folder = fs::path(flags.out).parent_path();
    std::error_code ec;
    if (!folder.empty() && !fs::is_directory(folder, ec))
      return invalid_argument("-o is '" + flags.out + "', but the folder does not exist: '" + folder.string() + "'");
  }
  const InterruptGuard guard;
  HttpClient client(flags.target);
  if (auto uploaded = upload_images(client, flags.fields); !uploaded) return uploaded;
  const auto body = job_body(flags);
  if (!body) return body.error();
  std::vector<std::string> headers;
  if (!flags.idempotency_key.empty()) headers.push_back("Idempotency-Key: " + flags.idempotency_key);
  const auto submitted = client.json("POST", "/v1/jobs", *body, headers);
  if (!submitted) return job::name_the_flag(submitted.error());
  const std::string id = text(*submitted, "id");
  if (flags.no_wait) return print_answer(flags.target, submitted, [&](const json::value&) { return id + "\n"; });

  const auto job = await_own_job(client, *submitted, flags.target.json);
  if (!job) return job.error();
  if (text(*job, "state") != "succeeded") return failure_of(*job);
  const auto images = save_pictures(client, *job, flags);
  if (!images) return images.error();

  if (flags.target.json) {
    print(json::object{{"id", id}, {"state", "succeeded"}, {"images", *images}, {"warnings", field(*job, "warnings")}});
    return {};
  }
  for (const json::value& warning : items(*job, "warnings")) {
    if (warning.is_string()) std::fprintf(stderr, "warning: %s\n", warning.get_string().c_str());
  }
  for (const json::value& image : *images) std::printf("%s\n", text(image, "path").c_str());
  return {};
}

}  // namespace

Result<std::string> job_body(const GenerateFlags& flags) {
  auto fields = job::body_of(flags.fields, "-o", flags.out);
  if (!fields) return fields.error();
  json::object& body = *fields;
  if (!flags.model.empty()) body["model"] = flags.model;
  if (flags.priority) body["priority"] = *flags.priority;
  if (flags.deadline_s) body["deadline_ms"] = static_cast<std::int64_t>(std::llround(*flags.deadline_s * 1e3));
  json::array loras;
  for (const std::string& use : flags.loras) {
    const auto lora = job::parse_lora_flag(use);
    if (!lora)
      return invalid_argument(
          "--lora is '" + use +
          "'; it must be NAME, NAME:SCALE or NAME:SCALE:EXPERT with a number from -100 to 100 and high, "
          "low or both, such as pixel:0.8");
    json::object entry{{"name", lora->name}, {"scale", lora->scale}};
    if (lora->expert != job::Expert::kBoth) entry["expert"] = job::expert_name(lora->expert);
    loras.push_back(std::move(entry));
  }
  if (!loras.empty()) body["loras"] = std::move(loras);
  return json::serialize(body);
}

void add_generate(CLI::App& app, Invocation& run) {
  auto flags = std::make_shared<GenerateFlags>();
  auto* command =
      app.add_subcommand("generate", "Generate images or videos on a running service and write them to files");
  command->footer(
      "Examples (put the prompt in quotes):\n"
      "  ditfleet generate \"a red circle\" -o circle.png\n"
      "  ditfleet generate \"the leaves move\" --model video --image tree.jpg -o tree.mp4\n"
      "  ditfleet generate \"a red circle\" -n 4 --idempotency-key order-7 --no-wait");
  add_target_flags(*command, flags->target);
  command->add_option("--model", flags->model, "Model; default: the service's default model");
  job::add_field_flags(*command, flags->fields, true);
  command->add_option("--lora", flags->loras, "LoRA adapter; EXPERT is high, low or both; may be repeated")
      ->type_name("NAME[:SCALE[:EXPERT]]")
      ->allow_extra_args(false);
  command
      ->add_option("-o,--out", flags->out,
                   "File to write: .png, .jpg, .webp or .mp4; with several images NAME-1.png …; default: the job's id")
      ->type_name("FILE");
  command->add_option("--priority", flags->priority, "Higher first within a tenant, from -100 to 100; default: 0")
      ->check(CLI::Range(-100, 100))
      ->type_name("NUMBER");
  command
      ->add_option("--deadline", flags->deadline_s,
                   "Seconds in which the job must end. One that cannot is refused; one that does not expires")
      ->check(CLI::Range(0.001, 604'800.0))
      ->type_name("SECONDS");
  command
      ->add_option("--idempotency-key", flags->idempotency_key,
                   "A repetition with the same key and the same request is the same job")
      ->type_name("KEY");
  command->add_flag("--no-wait", flags->no_wait, "Print the job's id and end; `ditfleet jobs watch ID` follows it");
  command->callback(
      [flags, &run] { run = [flags] { return run_on("generate", flags->target, [&] { return generate(*flags); }); }; });
}

}  // namespace ditfleet::cli
