
# The words of rnbd and rtrs, and the names of what runs here, come from the program itself.
_bowline_words() {
    local line=${COMP_LINE:0:COMP_POINT} words cur tool before
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    cur=${words[-1]}
    tool=("${words[0]}")
    before=("${words[@]:1:${#words[@]}-2}")
    if [[ ${words[0]##*/} != rnbd ]]; then
        tool+=("${words[1]}")
        before=("${before[@]:1}")
        if [[ ${words[1]} != @(rnbd|rtrs) || ${#words[@]} -lt 3 ]]; then
            _bowline "$@"
            return
        fi
    fi
    if [[ $cur == -* || ${before[0]} == export || ${before[0]} == verify ]]; then
        [[ ${words[0]##*/} == rnbd ]] || _bowline "$@"
        return
    fi
    local IFS=$'\n'
    COMPREPLY=($(compgen -W "$("${tool[@]}" -c "${before[@]}" 2> /dev/null)" -- "$cur"))
    # Bash takes what stands before a colon or an @ for words of their own.
    COMPREPLY=("${COMPREPLY[@]#"${cur%"${cur##*[:@]}"}"}")
}
complete -F _bowline_words -o default bowline rnbd
