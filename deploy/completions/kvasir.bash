# bash completion for kvasir, kv-indexer, kv-selector and kv-advisor: asks the program itself, so that it never lags behind.
_kvasir() {
    local current=${COMP_WORDS[COMP_CWORD]} word words=()
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        [[ $word == -* ]] && break
        words+=("$word")
    done
    mapfile -t COMPREPLY < <(compgen -W "$("${COMP_WORDS[0]}" "${words[@]}" --help-options 2>/dev/null)" -- "$current")
    [[ ${COMPREPLY[0]-} == *= ]] && compopt -o nospace
}
complete -o default -F _kvasir kvasir kv-indexer kv-selector kv-advisor
