# ditfleet_embed(OUTPUT HEADER NAMESPACE SYMBOL=FILE…): the command that writes OUTPUT, a C++ source that defines each
# SYMBOL as a std::string_view of its file's text. HEADER declares the symbols. FILEs are relative to the caller.
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set(ditfleet_embed_script ${CMAKE_CURRENT_LIST_FILE})
  function(ditfleet_embed output header namespace)
    set(pairs "")
    set(files "")
    foreach(pair IN LISTS ARGN)
      string(REGEX MATCH "^(.+)=(.+)$" _ ${pair})
      list(APPEND pairs "${CMAKE_MATCH_1}=${CMAKE_CURRENT_SOURCE_DIR}/${CMAKE_MATCH_2}")
      list(APPEND files ${CMAKE_CURRENT_SOURCE_DIR}/${CMAKE_MATCH_2})
    endforeach()
    list(JOIN pairs "|" pairs)
    add_custom_command(
      OUTPUT ${output}
      COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DHEADER=${header} -DNAMESPACE=${namespace} "-DFILES=${pairs}"
              -P ${ditfleet_embed_script}
      DEPENDS ${ditfleet_embed_script} ${files}
      VERBATIM)
  endfunction()
  return()
endif()

# cmake -DOUTPUT=… -DHEADER=… -DNAMESPACE=… "-DFILES=symbol=path|symbol=path" -P embed.cmake
set(text "// Generated from the files named in CMakeLists.txt.\n#include \"${HEADER}\"\n\nnamespace ${NAMESPACE} {\n")
string(REPLACE "|" ";" FILES "${FILES}")
foreach(pair IN LISTS FILES)
  string(REGEX MATCH "^([^=]+)=(.+)$" _ "${pair}")
  set(symbol ${CMAKE_MATCH_1})
  file(READ "${CMAKE_MATCH_2}" content)
  string(APPEND text "\nconst std::string_view ${symbol} = R\"embedded(${content})embedded\";\n")
endforeach()
string(APPEND text "\n}  // namespace ${NAMESPACE}\n")
file(WRITE "${OUTPUT}" "${text}")
