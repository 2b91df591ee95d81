#include "tests/history/redis_script.h"

extern "C" {
#include <lua5.1/lauxlib.h>
#include <lua5.1/lua-cjson.h>
#include <lua5.1/lua.h>
#include <lua5.1/lualib.h>
}

#include <cmath>
#include <cstdio>
#include <stdexcept>

namespace ditfleet::history {
namespace {

RedisModel* model = nullptr;         // whose Function runs
Script::Library* loading = nullptr;  // that registers its Functions

void push_error(lua_State* lua, const std::string& text) {
  lua_newtable(lua);
  lua_pushlstring(lua, text.data(), text.size());
  lua_setfield(lua, -2, "err");
}

// As Redis converts replies in RESP2: nil is false, a status is a table.
void push(lua_State* lua, const Reply& reply) {
  switch (reply.type) {
    case Reply::Type::kNil: lua_pushboolean(lua, 0); return;
    case Reply::Type::kString: lua_pushlstring(lua, reply.text.data(), reply.text.size()); return;
    case Reply::Type::kInteger: lua_pushnumber(lua, static_cast<lua_Number>(reply.integer)); return;
    case Reply::Type::kError: push_error(lua, reply.text); return;
    case Reply::Type::kStatus:
      lua_newtable(lua);
      lua_pushlstring(lua, reply.text.data(), reply.text.size());
      lua_setfield(lua, -2, "ok");
      return;
    case Reply::Type::kArray:
      lua_createtable(lua, static_cast<int>(reply.elements.size()), 0);
      for (std::size_t i = 0; i < reply.elements.size(); ++i) {
        push(lua, reply.elements[i]);
        lua_rawseti(lua, -2, static_cast<int>(i + 1));
      }
      return;
  }
}

// The value at the top of the stack as a reply; removes it.
Reply pop(lua_State* lua) {
  Reply out;
  std::size_t size = 0;
  switch (lua_type(lua, -1)) {
    case LUA_TSTRING: {
      const char* bytes = lua_tolstring(lua, -1, &size);
      out.type = Reply::Type::kString;
      out.text.assign(bytes, size);
      break;
    }
    case LUA_TNUMBER:
      out.type = Reply::Type::kInteger;
      out.integer = static_cast<std::int64_t>(lua_tonumber(lua, -1));
      break;
    case LUA_TBOOLEAN:
      if (lua_toboolean(lua, -1) != 0) {
        out.type = Reply::Type::kInteger;
        out.integer = 1;
      }
      break;
    case LUA_TTABLE: {
      for (const auto& [name, type] : {std::pair("err", Reply::Type::kError), std::pair("ok", Reply::Type::kStatus)}) {
        lua_getfield(lua, -1, name);
        if (lua_type(lua, -1) == LUA_TSTRING) {
          const char* bytes = lua_tolstring(lua, -1, &size);
          out.type = type;
          out.text.assign(bytes, size);
          lua_pop(lua, 2);
          return out;
        }
        lua_pop(lua, 1);
      }
      out.type = Reply::Type::kArray;
      for (int i = 1;; ++i) {
        lua_rawgeti(lua, -1, i);
        if (lua_isnil(lua, -1)) {
          lua_pop(lua, 1);
          break;
        }
        out.elements.push_back(pop(lua));
      }
      break;
    }
    default: break;
  }
  lua_pop(lua, 1);
  return out;
}

// Pushes the reply. Lua's errors are jumps, which must not pass objects: this function ends before one is raised.
bool run_command(lua_State* lua) {
  const int count = lua_gettop(lua);
  Arguments arguments;
  arguments.reserve(static_cast<std::size_t>(count));
  std::vector<std::string> numbers;
  numbers.reserve(static_cast<std::size_t>(count));
  for (int i = 1; i <= count; ++i) {
    if (lua_type(lua, i) == LUA_TNUMBER) {
      char digits[64];
      std::snprintf(digits, sizeof digits, "%.17g", lua_tonumber(lua, i));
      arguments.push_back(numbers.emplace_back(digits));
    } else if (lua_type(lua, i) == LUA_TSTRING) {
      std::size_t size = 0;
      const char* bytes = lua_tolstring(lua, i, &size);
      arguments.emplace_back(bytes, size);
    } else {
      push_error(lua, "ERR Lua redis lib command arguments must be strings or integers");
      return false;
    }
  }
  if (arguments.empty()) {
    push_error(lua, "ERR Please specify at least one argument for this redis lib call");
    return false;
  }
  const Reply reply = model->run(arguments);
  push(lua, reply);
  return reply.type != Reply::Type::kError;
}

int redis_call(lua_State* lua) { return run_command(lua) ? 1 : lua_error(lua); }
int redis_pcall(lua_State* lua) {
  (void)run_command(lua);
  return 1;
}

int redis_error_reply(lua_State* lua) {
  std::size_t size = 0;
  const char* text = luaL_checklstring(lua, 1, &size);
  if (size > 0 && *text == '-') ++text;
  lua_newtable(lua);
  lua_pushstring(lua, text);
  lua_setfield(lua, -2, "err");
  return 1;
}

int redis_status_reply(lua_State* lua) {
  lua_newtable(lua);
  lua_pushvalue(lua, 1);
  lua_setfield(lua, -2, "ok");
  return 1;
}

// register_function{function_name=, callback=, flags={}}.
int redis_register_function(lua_State* lua) {
  Function function;
  lua_getfield(lua, 1, "function_name");
  const char* name = lua_tostring(lua, -1);
  lua_getfield(lua, 1, "flags");
  for (int i = 1;; ++i) {
    lua_rawgeti(lua, -1, i);
    if (lua_isnil(lua, -1)) break;
    const std::string_view flag = lua_tostring(lua, -1);
    function.writes = function.writes && flag != "no-writes";
    function.allows_oom = function.allows_oom || flag == "allow-oom";
    lua_pop(lua, 1);
  }
  lua_getfield(lua, 1, "callback");
  function.callback = luaL_ref(lua, LUA_REGISTRYINDEX);
  loading->functions[name] = function;
  return 0;
}

lua_State* state() {
  static lua_State* const lua = [] {
    lua_State* made = luaL_newstate();
    luaL_openlibs(made);
    lua_pushcfunction(made, luaopen_cjson);
    lua_call(made, 0, 1);
    lua_setglobal(made, "cjson");
    lua_newtable(made);
    static constexpr luaL_Reg kFunctions[] = {{"call", redis_call},
                                              {"pcall", redis_pcall},
                                              {"error_reply", redis_error_reply},
                                              {"status_reply", redis_status_reply},
                                              {"register_function", redis_register_function}};
    for (const auto& [name, function] : kFunctions) {
      lua_pushcfunction(made, function);
      lua_setfield(made, -2, name);
    }
    lua_setglobal(made, "redis");
    lua_gc(made, LUA_GCSETPAUSE, 400);
    return made;
  }();
  return lua;
}

}  // namespace

const Script::Library& Script::load(const std::string& text) {
  static auto& loaded = *new std::map<std::string, Library>;
  const auto known = loaded.find(text);
  if (known != loaded.end()) return known->second;
  Library& library = loaded[text];
  const auto line = text.substr(0, text.find('\n'));
  const auto at = line.find("name=");
  if (!line.starts_with("#!lua") || at == std::string::npos) {
    library.error = "ERR Missing library metadata";
    return library;
  }
  library.library = line.substr(at + 5);
  loading = &library;
  // Lua skips a first line only in files. An empty one keeps the numbers of the lines.
  const std::string code = text.substr(line.size());
  if (luaL_loadbuffer(state(), code.data(), code.size(), "@user_function") != 0 || lua_pcall(state(), 0, 0, 0) != 0) {
    library.error = std::string("ERR Error compiling function: ") + lua_tostring(state(), -1);
    lua_pop(state(), 1);
  }
  return library;
}

Reply Script::call(RedisModel& of, const Function& function, const Arguments& a, std::size_t keys) {
  lua_State* lua = state();
  lua_rawgeti(lua, LUA_REGISTRYINDEX, function.callback);
  const auto push_table = [&](std::size_t from, std::size_t to) {
    lua_createtable(lua, static_cast<int>(to - from), 0);
    for (std::size_t i = from; i < to; ++i) {
      lua_pushlstring(lua, a[i].data(), a[i].size());
      lua_rawseti(lua, -2, static_cast<int>(i - from + 1));
    }
  };
  push_table(3, 3 + keys);
  push_table(3 + keys, a.size());
  model = &of;
  const int failed = lua_pcall(lua, 2, 1, 0);
  if (failed != 0 && lua_type(lua, -1) == LUA_TSTRING) {
    const std::string text = lua_tostring(lua, -1);
    lua_pop(lua, 1);
    return {.type = Reply::Type::kError, .text = "ERR " + text};
  }
  return pop(lua);
}

}  // namespace ditfleet::history
