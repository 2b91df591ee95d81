# cmake -DIN=ditfleet.lua -DOUT=library_text.cpp -P embed.cmake: the Function library as a C++ string.
file(READ "${IN}" text)
file(WRITE "${OUT}" "// Made from ditfleet.lua by embed.cmake.\n#include \"shared/queue/library.h\"\n\nnamespace ditfleet::queue {\nstd::string_view library_text() {\n  return R\"DITFLEET(${text})DITFLEET\";\n}\n}  // namespace ditfleet::queue\n")
