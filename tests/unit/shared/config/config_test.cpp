// shared/config: sources, precedence and error messages.
#include "shared/config/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "shared/config/options.h"
#include "shared/core/bytes.h"
#include "tests/paths.h"

namespace ditfleet::config {
namespace {

using testing::HasSubstr;

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }

 private:
  const char* name_;
};

std::string write_config(const std::string& text) {
  const auto dir = std::filesystem::path(testing::TempDir()) / "ditfleet-config-test";
  std::filesystem::create_directories(dir);
  const std::string path = (dir / "fleet.yaml").string();
  std::ofstream(path) << text;
  return path;
}

std::string refusal(const std::string& yaml) {
  const auto loaded = load_text(yaml, "fleet.yaml");
  EXPECT_FALSE(loaded.ok()) << yaml;
  if (loaded.ok()) return {};
  EXPECT_EQ(loaded.error().code, Code::kInvalidArgument);
  return loaded.error().message;
}

TEST(Settings, ATenantMayHaveItsOwnQuotas) {
  const auto loaded = load_text("tenants: {a: {weight: 2, streams: 3}}\nquotas: {streams: 5, adapters: 7}", "x");
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(quotas_of(*loaded, "a").streams, 3);
  EXPECT_EQ(quotas_of(*loaded, "a").adapters, 7);
  EXPECT_EQ(quotas_of(*loaded, "b").streams, 5);
  const auto again = load_text(to_yaml(*loaded), "x");
  ASSERT_TRUE(again.ok()) << again.error().message;
  EXPECT_EQ(quotas_of(*again, "a").streams, 3);
}

TEST(Settings, EmptySourcesGiveTheDefaults) {
  const auto loaded = load({.file = "", .sets = {}, .environment = false});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->gateway.listen, "127.0.0.1:8780");
  EXPECT_EQ(loaded->queue.lease_ms, 5000);
  EXPECT_TRUE(load_text("", "empty").ok());
  EXPECT_TRUE(load_text("# only a comment\ngateway:\n", "empty").ok());
}

TEST(Settings, EveryDefaultIsValidByItsOwnRule) {
  Settings settings;
  for (const Option& option : options()) {
    const auto assigned = assign(option, value_text(option, Settings{}), settings);
    EXPECT_TRUE(assigned.ok()) << option.key << " " << assigned.error().message;
  }
}

TEST(Settings, ReadsEverySectionOfAFile) {
  const auto loaded = load_text(R"(
gateway: {listen: "0.0.0.0:9000", max_connections: 5}
redis:
  url: redis://u:p@redis.example:6380/2
worker:
  count: 3
  warmup: off
default_model: flux.1-dev
models:
  flux.1-dev: {path: /models/dev}
  short: /models/short
tenants:
  acme: {weight: 2.5}
keys:
  - tenant: acme
    sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa
    admin: true
)",
                                "fleet.yaml");
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->gateway.listen, "0.0.0.0:9000");
  EXPECT_EQ(loaded->gateway.max_connections, 5);
  EXPECT_EQ(loaded->redis.url, "redis://u:p@redis.example:6380/2");
  EXPECT_EQ(loaded->worker.count, 3);
  EXPECT_FALSE(loaded->worker.warmup);
  EXPECT_EQ(loaded->models.at("flux.1-dev").path, "/models/dev");
  EXPECT_EQ(loaded->models.at("short").path, "/models/short");
  EXPECT_DOUBLE_EQ(loaded->tenants.at("acme").weight, 2.5);
  ASSERT_EQ(loaded->keys.size(), 1u);
  EXPECT_TRUE(loaded->keys[0].admin);
}

TEST(Settings, SetsBeatTheEnvironmentWhichBeatsTheFile) {
  const std::string file = write_config("worker: {count: 2, threads: 2, name: from-file}\n");
  const Variable count("DITFLEET_WORKER__COUNT", "3"), threads("DITFLEET_WORKER__THREADS", "3");
  const auto loaded = load({.file = file, .sets = {"worker.threads=4"}});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->worker.name, "from-file");
  EXPECT_EQ(loaded->worker.count, 3);
  EXPECT_EQ(loaded->worker.threads, 4);
}

TEST(Settings, EnvironmentNamesModelsAndTheDefault) {
  const Variable path("DITFLEET_MODELS__DEMO__PATH", "/m"), name("DITFLEET_DEFAULT_MODEL", "demo"),
      other("DITFLEET_LIBTORCH", "/x");
  const auto loaded = load({});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->models.at("demo").path, "/m");
  EXPECT_EQ(loaded->default_model, "demo");
}

TEST(Settings, AVariableWithOneUnderscoreTooFewIsRefusedByItsRightName) {
  const Variable count("DITFLEET_WORKER_COUNT", "3");
  const auto loaded = load({});
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, HasSubstr("'DITFLEET_WORKER__COUNT'"));
}

TEST(Settings, AFileIsOneDocument) {
  const auto loaded =
      load({.file = write_config("worker: {count: 2}\n---\nworker: {count: 3}\n"), .environment = false});
  ASSERT_FALSE(loaded.ok());
  EXPECT_THAT(loaded.error().message, HasSubstr(":3: a second YAML document"));
  EXPECT_TRUE(load({.file = write_config("---\nworker: {count: 2}\n...\n"), .environment = false}).ok());
  EXPECT_TRUE(load({.file = write_config("# nothing\n"), .environment = false}).ok());
}

TEST(Settings, RelativePathsOfAFileStartBesideIt) {
  const std::string file = write_config("models: {demo: {path: models/demo}}\n");
  const auto loaded = load({.file = file, .sets = {"results.dir=results"}, .environment = false});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->models.at("demo").path, std::filesystem::path(file).parent_path() / "models/demo");
  EXPECT_EQ(loaded->results.dir, std::filesystem::current_path() / "results");
}

// A path that stayed relative would name another file in a process with another working directory.
TEST(Settings, EveryPathIsAbsoluteWhereverItComesFrom) {
  const std::filesystem::path before = std::filesystem::current_path();
  const std::filesystem::path folder = std::filesystem::path(write_config("")).parent_path();
  int paths = 0;
  for (const Option& option : options()) {
    const bool several = option.form == Form::kPaths;
    if (option.form != Form::kPath && option.key != "compile.cxx" && !several) continue;
    ++paths;
    const std::string key(option.key), text = several ? "sub/a:/b:../c" : "sub/a";
    const auto whole = [&](const std::filesystem::path& base) {
      return (base / "sub/a").string() + (several ? ":/b:" + (base / "../c").lexically_normal().string() : "");
    };
    const auto value = [&](const Result<Settings>& loaded) {
      EXPECT_TRUE(loaded.ok()) << loaded.error().message;
      return loaded ? value_text(option, *loaded) : std::string();
    };
    // Nested sections as maps: {cache: {dir: sub/a}}
    std::string yaml = "\"" + text + "\"";
    for (std::string rest = key; !rest.empty();) {
      const auto dot = rest.rfind('.');
      yaml = "{" + rest.substr(dot == rest.npos ? 0 : dot + 1) + ": " + yaml + "}";
      rest.resize(dot == rest.npos ? 0 : dot);
    }
    write_config(yaml);
    std::filesystem::current_path(folder);
    EXPECT_EQ(value(load({.file = "fleet.yaml", .environment = false})), whole(folder))
        << key << " of a file beside us";
    std::filesystem::current_path(before);
    EXPECT_EQ(value(load({.file = (folder / "fleet.yaml").string(), .environment = false})), whole(folder)) << key;
    EXPECT_EQ(value(load({.sets = {key + "=" + text}, .environment = false})), whole(before)) << key;
    const Variable variable(environment_name(key).c_str(), text.c_str());
    EXPECT_EQ(value(load({})), whole(before)) << key;
  }
  EXPECT_GE(paths, 10);
  std::filesystem::current_path(folder);
  write_config("models: {a: {path: m, transformer: t.safetensors}, b: n}");
  const auto models = load({.file = "fleet.yaml", .sets = {"compile.cxx=clang++"}, .environment = false});
  std::filesystem::current_path(before);
  ASSERT_TRUE(models.ok()) << models.error().message;
  EXPECT_EQ(models->models.at("a").path, folder / "m");
  EXPECT_EQ(models->models.at("a").files.at("transformer"), folder / "t.safetensors");
  EXPECT_EQ(models->models.at("b").path, folder / "n");
  EXPECT_EQ(models->compile.cxx, "clang++") << "a name is searched in PATH";
}

TEST(Settings, AllWrongKeysAreReportedAtOnce) {
  const std::string file = write_config(
      "worker:\n  cuont: 2\n  dtype: fp23\ngatway:\n  listen: 127.0.0.1:1\nkyes:\n  - {tenant: a}\n"
      "models:\n  a: {pth: /m}\nlog:\n  level: info\n  level: debug\n");
  const Variable variable("DITFLEET_WORKER__DEVISE", "cpu");
  const auto loaded = load({.file = file, .sets = {"cache.dri=/c"}});
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, Code::kInvalidArgument);
  const std::string& told = loaded.error().message;
  EXPECT_EQ(std::count(told.begin(), told.end(), '\n'), 7) << told;
  for (const char* part :
       {":2: unknown key 'worker.cuont'; did you mean 'worker.count'?", ":3: worker.dtype is 'fp23'",
        ":5: unknown key 'gatway.listen'; did you mean 'gateway.listen'?", ":7: 'kyes' is a list",
        "did you mean 'keys'?", ":9: unknown key 'models.a.pth'; did you mean 'path'?", ":12: 'level' is given twice",
        "DITFLEET_WORKER__DEVISE: unknown key 'worker.devise'; did you mean 'DITFLEET_WORKER__DEVICE'?",
        "--set cache.dri: unknown key 'cache.dri'; did you mean 'cache.dir'?"})
    EXPECT_THAT(told, HasSubstr(part));
}

TEST(Settings, EverySectionMayBeEmpty) {
  std::set<std::string> sections = {"models", "tenants", "keys"};
  for (const Option& option : options())
    if (const auto dot = option.key.find('.'); dot != option.key.npos) sections.emplace(option.key.substr(0, dot));
  for (const std::string& section : sections) {
    for (const char* empty : {":\n", ": {}\n", ":\n#  flux: /m\n"}) {
      const auto loaded = load_text(section + empty, "f");
      EXPECT_TRUE(loaded.ok()) << section << empty << loaded.error().message;
    }
  }
}

TEST(Settings, TheConfigurationOfThePackageIsValidWithoutItsCommentSigns) {
  const auto text = read_file(source_path("deploy/packages/ditfleet.yaml"));
  ASSERT_TRUE(text.ok());
  EXPECT_TRUE(load_text(*text, "f").ok());
  const auto loaded = load_text(std::regex_replace(*text, std::regex("\n#( *[a-z_]+:)"), "\n$1"), "f");
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->models.size(), 1u) << "the example";
}

TEST(Settings, ModelsAreFoundInTheHubsCache) {
  const std::filesystem::path cache = ::testing::TempDir() + "/hub", folder = cache / "models--me--small";
  for (const char* commit : {"abc123", "def456"}) std::filesystem::create_directories(folder / "snapshots" / commit);
  std::filesystem::create_directories(folder / "refs");
  std::ofstream(folder / "refs" / "main") << "abc123\n";
  std::ofstream(folder / "refs" / "new") << "def456";
  std::ofstream(folder / "snapshots" / "abc123" / "x.gguf") << "x";
  const Variable variable("HF_HUB_CACHE", cache.c_str());
  const auto path = [](const std::string& text, const char* key = "path") {
    const auto loaded =
        load({.sets = {"models.a.path=/m", std::string("models.a.") + key + "=" + text}, .environment = false});
    if (!loaded) return loaded.error().message;
    const ModelSetting& model = loaded->models.at("a");
    return key == std::string("path") ? model.path : model.files.at(key);
  };
  EXPECT_EQ(path("hf:me/small"), folder / "snapshots" / "abc123");
  EXPECT_EQ(path("hf:me/small@new"), folder / "snapshots" / "def456");
  EXPECT_EQ(path("hf:me/small@def456"), folder / "snapshots" / "def456");
  EXPECT_EQ(path("hf:me/small/x.gguf", "transformer"), folder / "snapshots" / "abc123" / "x.gguf");
  EXPECT_THAT(path("hf:me/other"), HasSubstr("is not in " + cache.string() + "; `hf download me/other` fetches it"));
  EXPECT_THAT(path("hf:me/small/y.gguf", "vae"), HasSubstr("`hf download me/small y.gguf` fetches it"));
  EXPECT_THAT(path("hf:me/small@old"), HasSubstr("`hf download me/small --revision old` fetches it"));
  for (const char* wrong : {"hf:small", "hf:", "hf:me/../../x", "hf:me/a b", "hf:me//", "hf:me/small@../x"})
    EXPECT_THAT(path(wrong), HasSubstr("must be hf:ORG/NAME")) << wrong;
}

TEST(Settings, ModelsMayBeQuantizedAndHaveATransformerOfTheirOwn) {
  using Formats = std::map<std::string, std::string>;
  const std::string file = write_config(
      "models: {demo: {path: /m, transformer: flux.safetensors, quantize: {transformer: fp8, text_encoder_2: nf4},\n"
      "  attention: fp8}}\n");
  auto loaded = load({.file = file, .environment = false});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  const ModelSetting demo = loaded->models.at("demo");
  EXPECT_EQ(demo.path, "/m");
  EXPECT_EQ(demo.files.at("transformer"), std::filesystem::path(file).parent_path() / "flux.safetensors");
  EXPECT_EQ(demo.quantize, (Formats{{"transformer", "fp8"}, {"text_encoder_2", "nf4"}}));
  EXPECT_EQ(demo.attention, "fp8");
  // As rendered, which is what `ditfleet up` gives its workers.
  loaded = load({.file = write_config(to_yaml(*loaded, true)), .environment = false});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->models.at("demo").files, demo.files);
  EXPECT_EQ(loaded->models.at("demo").quantize, demo.quantize);
  EXPECT_EQ(loaded->models.at("demo").attention, "fp8");

  const Variable path("DITFLEET_MODELS__A__PATH", "/m"), all("DITFLEET_MODELS__A__QUANTIZE", "transformer=nf4");
  loaded = load({.sets = {"models.b.1.path=/m", "models.b.1.quantize.transformer=fp8", "models.b.1.transformer=/f",
                          "models.b.1.attention=fp8"}});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(loaded->models.at("a").quantize, (Formats{{"transformer", "nf4"}}));
  EXPECT_EQ(loaded->models.at("b.1").quantize, (Formats{{"transformer", "fp8"}}));
  EXPECT_EQ(loaded->models.at("b.1").attention, "fp8");
  EXPECT_EQ(loaded->models.at("b.1").files.at("transformer"), "/f");

  EXPECT_THAT(refusal("models: {a: {path: /m, attention: int8}}"), HasSubstr("'int8'; it must be fp8"));
  EXPECT_THAT(refusal("models: {a: {path: /m, quantize: nf4}}"), HasSubstr("'nf4'; it must be COMPONENT=FORMAT"));
  EXPECT_THAT(refusal("models: {a: {path: /m, quantise: {transformer: nf4}}}"), HasSubstr("did you mean 'quantize'?"));
  EXPECT_THAT(refusal("models: {a: {path: /m, quantize: {transformer: {x: nf4}}}}"), HasSubstr("nested too deep"));
  EXPECT_THAT(refusal("models: {a: {path: /m, path: {x: y}}}"), HasSubstr("fleet.yaml:1"));
  for (const char* text :
       {"transformer", "=nf4", "transformer=", "transformer=nf4,transformer=fp8", ",transformer=fp8"})
    EXPECT_FALSE(parse_quantize(text).ok()) << text;
  EXPECT_TRUE(parse_quantize("")->empty());
}

TEST(Settings, MissingFileIsNotFound) {
  const auto loaded = load({.file = "/nonexistent/fleet.yaml"});
  ASSERT_FALSE(loaded.ok());
  EXPECT_EQ(loaded.error().code, Code::kNotFound);
  EXPECT_THAT(loaded.error().message, HasSubstr("/nonexistent/fleet.yaml"));
}

TEST(Settings, UnknownKeysNameTheNearestAndTheLine) {
  EXPECT_THAT(refusal("gateway:\n  listn: x\n"), testing::AllOf(HasSubstr("fleet.yaml:2"), HasSubstr("'gateway.listn'"),
                                                                HasSubstr("did you mean 'gateway.listen'?")));
  EXPECT_THAT(refusal("gatway:\n  listen: x\n"), HasSubstr("did you mean 'gateway.listen'?"));
  EXPECT_THAT(refusal("scheduler:\n  lease_ms: 5000\n"), HasSubstr("queue.lease_ms"));
  EXPECT_THAT(refusal("models: {a: {pth: /x}}"), HasSubstr("did you mean 'path'?"));
  EXPECT_THAT(refusal("keys: [{tenant: a, sha265: b}]"), HasSubstr("did you mean 'sha256'?"));
  EXPECT_THAT(refusal("tenants: {a: {wieght: 1}}"), HasSubstr("tenants.NAME.weight"));
  EXPECT_THAT(refusal("tenants: {a: {streams: 0}}"),
              HasSubstr("tenants.a.streams is '0'; it must be an integer from 1"));

  const auto set = load({.sets = {"worker.cuont=2"}});
  ASSERT_FALSE(set.ok());
  EXPECT_THAT(set.error().message, testing::AllOf(HasSubstr("--set worker.cuont"), HasSubstr("worker.count")));
  const Variable variable("DITFLEET_GATEWAY__LISTN", "x");
  const auto environment = load({});
  ASSERT_FALSE(environment.ok());
  EXPECT_THAT(environment.error().message,
              testing::AllOf(HasSubstr("DITFLEET_GATEWAY__LISTN"), HasSubstr("'DITFLEET_GATEWAY__LISTEN'")));
}

// Files that an earlier version has written contain its default.
TEST(Settings, ARemovedOptionMayKeepItsDefault) {
  const auto loaded = load_text("compile: {components: {text_encoders: false, vae: \"false\"}}", "fleet.yaml");
  ASSERT_TRUE(loaded) << loaded.error().message;
  EXPECT_EQ(loaded->compile.components.vae, "false");
  EXPECT_THAT(refusal("compile: {components: {text_encoders: true}}"),
              HasSubstr("compile.components.text_encoders was removed: text encoders are not compiled"));
}

TEST(Settings, InvalidValuesSayWhatWouldBeRight) {
  EXPECT_THAT(refusal("worker: {count: many}"),
              testing::AllOf(HasSubstr("worker.count is 'many'"), HasSubstr("an integer from 0 to 256")));
  EXPECT_THAT(refusal("worker: {count: 257}"), HasSubstr("an integer from 0 to 256"));
  EXPECT_THAT(refusal("worker: {count: 99999999999999999999}"), HasSubstr("an integer from 0 to 256"));
  EXPECT_THAT(refusal("worker: {dtype: fp8}"), HasSubstr("one of auto, fp32, bf16"));
  EXPECT_THAT(refusal("worker: {warmup: maybe}"), HasSubstr("true or false"));
  EXPECT_THAT(refusal("gateway: {listen: localhost}"), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal("gateway: {listen: 'localhost:70000'}"), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal("redis: {maxmemory: lots}"), HasSubstr("512mb"));
  EXPECT_THAT(refusal("gateway: 5"), HasSubstr("section"));
  EXPECT_THAT(refusal("default_model: x"), HasSubstr("which is not in models"));
  EXPECT_THAT(refusal("queue: {lease_ms: 1500, renew_ms: 1000}"), HasSubstr("twice"));
  EXPECT_THAT(refusal("keys: [{tenant: a, sha256: abc}]"), HasSubstr("64 lower-case"));
  EXPECT_THAT(refusal("keys: [{tenant: a}]"), HasSubstr("no sha256"));
  EXPECT_THAT(refusal("gateway: {listen: '1.1.1.1:1', listen: '1.1.1.1:2'}"), HasSubstr("twice"));
  EXPECT_THAT(refusal("gateway: [1]"), HasSubstr("list"));
  EXPECT_THAT(refusal("- a"), HasSubstr("map of sections"));
  EXPECT_THAT(refusal("gateway: {listen: [a"), HasSubstr("not valid YAML"));
  EXPECT_THAT(refusal(","), HasSubstr("a second YAML document"));  // yaml-cpp sees empty ones without end
  EXPECT_THAT(refusal("tenants: {é: {weight: 2}}"), HasSubstr("A-Z a-z 0-9 . _ -"));  // as the queue takes them
  EXPECT_TRUE(is_valid_utf8(refusal("gateway: {listen: \"\\ó\"}")));                  // yaml-cpp quotes half of the ó
  EXPECT_THAT(refusal("a: {b: {c: {d: 1}}}"), HasSubstr("too deep"));
  const auto no_equals = load({.sets = {"worker.count"}});
  ASSERT_FALSE(no_equals.ok());
  EXPECT_THAT(no_equals.error().message, HasSubstr("key=value"));
}

TEST(Settings, AWrongRedisUrlIsNotRepeated) {
  const std::string message = refusal("redis: {url: 'http://user:secret@host'}");
  EXPECT_THAT(message, HasSubstr("redis://"));
  EXPECT_THAT(message, testing::Not(HasSubstr("secret")));
  for (const char* url : {"redis://u:hunter2@h:99999", "redis://u:hun/ter2@h", "redis://u:hun?ter2@h",
                          "u:hunter2@redis://h", "redis://u:hunter2@", "u:hunter2@h", "redis://u:%hunter2@h",
                          "redis+sentinel://u:hunter2@h", "redis+sentinel://u:hun,ter2@h:x/s"})
    EXPECT_THAT(refusal("redis: {url: '" + std::string(url) + "'}"),
                testing::AllOf(HasSubstr("redis.url"), testing::Not(HasSubstr("ter2"))))
        << url;
}

TEST(Settings, APortThatCannotBeIsRefusedWhereverOneStands) {
  EXPECT_THAT(refusal("redis: {url: 'redis://127.0.0.1:99999'}"),
              testing::AllOf(HasSubstr("redis.url"), HasSubstr("port is '99999'"), HasSubstr("1 to 65535")));
  EXPECT_THAT(refusal("redis: {url: 'redis://h:0'}"), HasSubstr("1 to 65535"));
  EXPECT_THAT(refusal("redis: {url: 'rediss://h:tls'}"), HasSubstr("port is 'tls'"));
  EXPECT_THAT(refusal("redis: {url: 'redis://h/first'}"), HasSubstr("database is 'first'"));
  EXPECT_THAT(refusal("redis: {url: 'unix://redis.sock'}"), HasSubstr("must be absolute"));
  EXPECT_THAT(refusal("gateway: {listen: '127.0.0.1:99999'}"), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal("worker: {metrics_listen: '127.0.0.1:99999'}"), HasSubstr("HOST:PORT"));
  EXPECT_THAT(refusal("gateway: {public_url: 'http://h:99999'}"),
              testing::AllOf(HasSubstr("'http://h:99999', which has port '99999'"), HasSubstr("1 to 65535")));
  EXPECT_THAT(refusal("telemetry: {otlp_endpoint: 'http://u:hunter2@h:99999'}"),
              testing::AllOf(HasSubstr("port '99999'"), testing::Not(HasSubstr("hunter2"))));
  // Each worker serves its metrics on the next port.
  EXPECT_THAT(refusal("worker: {metrics_listen: '127.0.0.1:65534', count: 3}"),
              testing::AllOf(HasSubstr("end at 65535"), HasSubstr("start at 65533")));
  for (const char* right :
       {"redis: {url: 'redis://u:p%2Fq@h:65535/3'}", "redis: {url: 'unix:///run/a@b.sock?db=1'}",
        "gateway: {public_url: 'https://h:443/images'}", "worker: {metrics_listen: '127.0.0.1:65533', count: 3}",
        "worker: {metrics_listen: '127.0.0.1:0', count: 3}"}) {
    const auto loaded = load_text(right, "x");
    EXPECT_TRUE(loaded.ok()) << right << ": " << loaded.error().message;
  }
}

TEST(Settings, WhatIsShownLoadsBackAndHidesThePassword) {
  const auto first = load_text(
      "redis: {url: 'redis://u:hunter2@h', sentinel_password: hunter2}\ncache: {secret: "
      "hunter2hunter2hunter2}\nmodels: {demo: /m}\ntenants: {a: "
      "{weight: 3}}\n",
      "x");
  ASSERT_TRUE(first.ok()) << first.error().message;
  EXPECT_THAT(to_yaml(*first), testing::AllOf(testing::Not(HasSubstr("hunter2")), HasSubstr("secret: \"***\"")));
  const std::string full = to_yaml(*first, true);
  const auto second = load_text(full, "x");
  ASSERT_TRUE(second.ok()) << second.error().message;
  EXPECT_EQ(to_yaml(*second, true), full);
  EXPECT_EQ(second->redis.url, "redis://u:hunter2@h");
  EXPECT_EQ(second->cache.secret, "hunter2hunter2hunter2");
  EXPECT_EQ(second->models.at("demo").path, "/m");
  EXPECT_FALSE(load_text(to_yaml(*first), "x").ok()) << "*** is taken for a secret";
}

TEST(Settings, ASecretIsNeverRepeated) {
  EXPECT_THAT(refusal("cache: {secret: hunter2}"),
              testing::AllOf(HasSubstr("cache.secret"), HasSubstr("16"), testing::Not(HasSubstr("hunter2"))));
  EXPECT_THAT(refusal("cache: {secret: hunter2hunter2hunter2, secret_file: /s}"),
              testing::AllOf(HasSubstr("cache.secret_file"), testing::Not(HasSubstr("hunter2"))));
}

TEST(Settings, ADeadCompilerIsOutlivedOrNotWaitedFor) {
  EXPECT_THAT(refusal("cache: {lock_ms: 2000, wait_ms: 3000}"), HasSubstr("cache.wait_ms"));
  EXPECT_TRUE(load_text("cache: {lock_ms: 2000, wait_ms: 0}", "x").ok());
}

TEST(Settings, TheDataFolderIsWhatIsSetOrTheUsers) {
  Settings settings;
  {
    const Variable state("XDG_STATE_HOME", "/state");
    EXPECT_EQ(data_folder(settings), "/state/ditfleet");
  }
  const Variable home("HOME", "/home/u");
  EXPECT_EQ(data_folder(settings), "/home/u/.local/state/ditfleet");
  settings.data.dir = "/data";
  EXPECT_EQ(data_folder(settings), "/data");
}

TEST(Settings, ListsOfMapsComeFromEverySource) {
  const std::string file = write_config(
      "compile:\n  rules:\n    - {max_frames: 49, mode: reduce-overhead}\n    - {min_frames: 81, min_tokens: 2, "
      "max_tokens: 9, mode: none}\n"
      "worker: {warmup_classes: [{width: 64, height: 32, frames: 81, true_cfg: true, max_sequence_length: 16}]}\n");
  const auto loaded = load({.file = file, .environment = false});
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  ASSERT_EQ(loaded->compile.rules.size(), 2u);
  EXPECT_EQ(loaded->compile.rules[0].max_frames, 49);
  EXPECT_EQ(loaded->compile.rules[0].min_frames, std::nullopt);
  EXPECT_EQ(loaded->compile.rules[0].mode, "reduce-overhead");
  EXPECT_EQ(loaded->compile.rules[1].min_frames, 81);
  EXPECT_EQ(loaded->compile.rules[1].max_tokens, 9);
  ASSERT_EQ(loaded->worker.warmup_classes.size(), 1u);
  EXPECT_EQ(loaded->worker.warmup_classes[0].width, 64);
  EXPECT_EQ(loaded->worker.warmup_classes[0].frames, 81);
  EXPECT_TRUE(loaded->worker.warmup_classes[0].true_cfg);
  EXPECT_EQ(to_yaml(load_text(to_yaml(*loaded), "x").value()), to_yaml(*loaded)) << "what is shown loads back";

  const Variable rules("DITFLEET_COMPILE__RULES", "[{mode: none}]");
  const auto replaced = load({.file = file, .sets = {"worker.warmup_classes=[]"}});
  ASSERT_TRUE(replaced.ok()) << replaced.error().message;
  ASSERT_EQ(replaced->compile.rules.size(), 1u) << "a stronger source replaces the list";
  EXPECT_EQ(replaced->compile.rules[0].mode, "none");
  EXPECT_TRUE(replaced->worker.warmup_classes.empty());
}

TEST(Settings, WrongListsSayWhatWouldBeRight) {
  using testing::AllOf;
  EXPECT_THAT(refusal("compile:\n  rules:\n    - {max_frmes: 49, mode: none}\n"),
              AllOf(HasSubstr("fleet.yaml:3"), HasSubstr("did you mean 'max_frames'")));
  EXPECT_THAT(refusal("compile: {rules: [{mode: fast}]}"),
              AllOf(HasSubstr("compile.rules.0.mode is 'fast'"), HasSubstr("one of none, default")));
  EXPECT_THAT(refusal("compile: {rules: [{max_frames: 49}]}"), HasSubstr("compile.rules.0 has no mode"));
  EXPECT_THAT(refusal("compile: {rules: [{min_frames: 2, max_frames: 1, mode: none}]}"),
              HasSubstr("min_frames 2 and max_frames 1"));
  EXPECT_THAT(refusal("compile: {rules: [{min_tokens: 0, mode: none}]}"), HasSubstr("an integer from 1 to"));
  EXPECT_THAT(refusal("compile: {rules: {mode: none}}"), HasSubstr("must be a list of maps"));
  EXPECT_THAT(refusal("compile: {rules: [none]}"), HasSubstr("an entry of compile.rules must be a map"));
  EXPECT_THAT(refusal("compile: {rules: none}"), HasSubstr("must be a list of maps"));
  EXPECT_THAT(refusal("compile: {rule: [{mode: none}]}"), HasSubstr("is a list; only"));
  EXPECT_THAT(refusal("worker: {warmup_classes: [{width: 64}]}"), HasSubstr("has no height"));
  EXPECT_THAT(refusal("models: {demo: /m}\nworker: {warmup_classes: [{model: dem, width: 64, height: 64}]}"),
              HasSubstr("did you mean 'demo'"));
  EXPECT_THAT(refusal("worker: {warmup_classes: [{width: 64, height: 64, batch: 2}]}"),
              HasSubstr("unknown key 'worker.warmup_classes.0.batch'"));
  const auto set = load({.sets = {"compile.rules=[{mode: nope}]"}, .environment = false});
  ASSERT_FALSE(set.ok());
  EXPECT_THAT(set.error().message, AllOf(HasSubstr("--set compile.rules"), HasSubstr("'nope'")));
  const auto broken = load({.sets = {"compile.rules=[{mode"}, .environment = false});
  ASSERT_FALSE(broken.ok());
  EXPECT_THAT(broken.error().message, HasSubstr("is not a YAML list"));
}

TEST(Reference, IsCurrent) {
  const auto committed = read_file(source_path("config/REFERENCE.md"));
  ASSERT_TRUE(committed.ok()) << committed.error().message;
  EXPECT_EQ(*committed, reference_markdown()) << "run: build/bin/ditfleet config reference > config/REFERENCE.md";
}

TEST(Reference, TheDefaultFileSaysTheDefaults) {
  const auto text = read_file(source_path("config/ditfleet.yaml"));
  ASSERT_TRUE(text.ok()) << text.error().message;
  const auto loaded = load_text(*text, "config/ditfleet.yaml");
  ASSERT_TRUE(loaded.ok()) << loaded.error().message;
  EXPECT_EQ(to_yaml(*loaded), to_yaml(Settings{}));
}

TEST(Config, AGatewayThatOthersReachNeedsKeysOrMustBeDeclaredOpen) {
  const auto problem = [](const std::string& yaml) {
    const auto settings = load_text(yaml, "f");
    EXPECT_TRUE(settings.ok()) << settings.error().message;
    const auto checked = check_gateway(*settings);
    return checked ? std::string() : checked.error().message;
  };
  const std::string key = "keys: [{tenant: a, sha256: " + std::string(64, '0') + "}]\n";
  for (const char* listen : {"0.0.0.0:1", ":1", "10.0.0.1:1", "\"[::]:1\"", "render-1:1", "127.evil.example:1"}) {
    const std::string yaml = "gateway: {listen: " + std::string(listen) + "}\n";
    EXPECT_THAT(problem(yaml),
                testing::AllOf(HasSubstr("gateway.listen is"), HasSubstr("gateway.open"), HasSubstr("configure keys")))
        << listen;
    EXPECT_EQ(problem(yaml + key), "") << listen;
    EXPECT_EQ(problem("gateway: {open: true, listen: " + std::string(listen) + "}"), "") << listen;
    EXPECT_EQ(problem("gateway: {require_keys: true, listen: " + std::string(listen) + "}"), "") << listen;
  }
  for (const char* listen : {"127.0.0.1:1", "localhost:1", "\"[::1]:1\"", "127.1.2.3:1"})
    EXPECT_EQ(problem("gateway: {listen: " + std::string(listen) + "}"), "") << listen;
  EXPECT_THAT(problem("gateway: {tls_cert_file: /c}"), HasSubstr("gateway.tls_key_file"));
}

}  // namespace
}  // namespace ditfleet::config
